package decoder

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The columns of the control table that are read. All are text, which is the same bytes in both forms.
const (
	controlOutbox = iota
	controlPrefix
	controlContent
	controlColumns
)

// controlPlan says at which places in a tuple of the control table the columns are that are read; none where
// the table has no such column.
type controlPlan struct {
	width  int
	places [controlColumns]int
}

// controlRelation reads the description of the control table.
func (d *Decoder) controlRelation(m *reader, n int) error {
	p := &controlPlan{width: n, places: [...]int{none, none, none}}
	for i := range n {
		name, _ := attributeOf(m)
		for k, want := range relay.ControlColumns {
			if string(name) == want {
				p.places[k] = i
			}
		}
	}
	d.control = p
	return d.end(m)
}

// controlRow reads what stands in a row of the control table in place of a logical message. A row of another
// outbox, or with a prefix that is not known, is nothing.
func (d *Decoder) controlRow(m *reader, r *Result) error {
	p, n := d.control, int(m.u16())
	switch {
	case m.short:
		return nil
	case p == nil:
		return d.protocol(m, "a row of the control table before its Relation message")
	case n != p.width:
		return d.protocol(m, "%d columns where the Relation message had %d", n, p.width)
	}
	var values [controlColumns][]byte
	for i := range n {
		kind, start := m.u8(), m.off
		switch kind {
		case kindText, kindBinary:
			size := m.u32()
			start = m.skip(size)
		case kindNull:
		default:
			if !m.short {
				return d.protocol(m, "column %d is of the unknown kind %q", i+1, kind)
			}
		}
		if m.short {
			return nil
		}
		for k, place := range p.places {
			if place == i {
				values[k] = m.b[start:m.off]
			}
		}
	}
	if err := d.end(m); err != nil || string(values[controlOutbox]) != d.cfg.Mapping.Table {
		return err
	}
	prefix := string(values[controlPrefix])
	switch {
	case prefix == relay.ClusterPrefix && d.tx.cluster != 0:
		if err := d.clusterRow(values[controlContent]); err != nil {
			return &outbox.Fault{Class: outbox.Fatal, Code: CodeClusterRow, Hint: hintClusterRow, Err: err,
				Message: fmt.Sprintf("a row of control table %s, by which the clusters agree on who "+
					"publishes what, can't be read", d.cfg.Mapping.Control)}
		}
		return nil
	case d.tx.foreign: // of what another cluster says to its own outflow nothing counts here
		return nil
	}
	switch prefix {
	case relay.HeartbeatPrefix:
		d.tx.tick = true
	case relay.SettingsPrefix:
		r.Malformed = d.settings(values[controlContent])
	case relay.WatermarkPrefix:
		if d.cfg.Mapping.Away() { // at home it is known
			r.Malformed = d.watermark(values[controlContent])
		}
	}
	return nil
}

// maxWatermark is more than a well-formed watermark takes, in bytes.
const maxWatermark = 512

// watermark takes note of what the home says of itself. The result is not nil if it can't be read as that.
func (d *Decoder) watermark(content []byte) (malformed error) {
	if len(content) > maxWatermark {
		return fmt.Errorf("watermark of more than %d bytes", maxWatermark)
	}
	w, err := relay.ParseWatermark(string(content), d.tx.home)
	if err == nil {
		d.tx.watermark = w
	}
	return err
}

const (
	maxClusterRow  = 256 // more than a well-formed one takes, in bytes
	maxClusterRows = 16  // in a transaction: an outflow writes one or two
)

// CodeClusterRow is the code of the fault of a cluster row that can't be read, or is not by the cluster that
// it came from. Whoever passes one over may publish what another cluster does.
const CodeClusterRow = "cluster_row"

const hintClusterRow = "If another cluster runs a newer Outflow, run that one here too. Otherwise somebody " +
	"else writes into the control table, or its rows come by another way than from the cluster that wrote " +
	"them"

// clusterRow takes note of what a cluster says to the others. An error says that it can't be read, or that
// its order among the rows of its cluster says nothing.
func (d *Decoder) clusterRow(content []byte) error {
	switch {
	case len(content) > maxClusterRow:
		return fmt.Errorf("cluster row of more than %d bytes", maxClusterRow)
	case len(d.tx.rows) == maxClusterRows:
		return fmt.Errorf("more than %d cluster rows in a transaction", maxClusterRows)
	}
	row, err := relay.ParseClusterRow(string(content))
	switch {
	case err != nil:
		return err
	case row.By != d.tx.cluster:
		return fmt.Errorf("cluster row %q came from cluster %d", content, d.tx.cluster)
	case row.Kind == relay.Published && row.To > d.tx.there,
		row.Kind == relay.Claim && row.Home == d.cfg.Clusters[""] && row.To > d.tx.final:
		return fmt.Errorf("cluster row %q speaks of what comes behind its own commit, at %v there and at %v "+
			"here", content, d.tx.there, d.tx.final)
	}
	d.tx.rows = append(d.tx.rows, row)
	return nil
}
