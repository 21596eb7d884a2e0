package repair

import (
	"slices"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/tablesnapshot"
	"github.com/outflowhq/outflow/sink"
)

// idsMayRepeat reports whether the stream may have events of other rows than those of the snapshot: of
// another table, or from WAL that this server does not have. Ids from a counter start over there. In all
// other cases an id belongs to one event, whatever its row holds by now.
func (f *finding) idsMayRepeat(snap *tablesnapshot.Snapshot) bool {
	if snap == nil || f.Record == nil {
		return false
	}
	switch f.begunFor() {
	case "system_changed", "server_behind", "timeline_lost", "timeline_unknown", "divergence":
		return true
	}
	before := f.published()
	return before != 0 && before != snap.Table().OID || f.WentBack()
}

// identity tells events with the same id apart by key and document, as far as a message says them. A nil one
// takes all for the same.
type identity struct {
	columnNames []string
	rows        *backfill.Rows
	keyed       bool

	template *outbox.SubjectTemplate
	doc      string // the template's column that is the document; "" if it has none

	fingerprints map[idHash]fingerprint
}

// fingerprint is a row's key and document in the form that its message has.
type fingerprint struct{ key, doc idHash }

func newIdentity(cfg config.Config, l *wiring.Layout, snap *tablesnapshot.Snapshot) (*identity, error) {
	v := &identity{keyed: l.Mapping.Keyed(), fingerprints: map[idHash]fingerprint{}}
	names := []string{l.Mapping.Doc, l.Mapping.Actor, l.Mapping.Counter, l.Mapping.Key}
	slices.Sort(names)
	columns := snap.StreamedColumns(slices.Compact(names))
	for _, c := range columns {
		v.columnNames = append(v.columnNames, c.Name)
	}
	var err error
	if v.rows, err = backfill.NewRows(cfg, l, columns); err != nil {
		return nil, err
	}
	if v.template, err = outbox.ParseSubjectTemplate(cfg.Subject); err != nil {
		return nil, err
	}
	for _, c := range v.template.Columns() {
		if _, whole := v.template.Encoded(c, ""); whole && l.Uses[c].Role == config.InDoc {
			v.doc = c
		}
	}
	return v, nil
}

// columns are the columns that add takes.
func (v *identity) columns() []string {
	if v == nil {
		return nil
	}
	return v.columnNames
}

// add adds a candidate.
func (v *identity) add(id idHash, values [][]byte) error {
	if v == nil {
		return nil
	}
	e, err := v.rows.Event(values)
	if err != nil {
		return err
	}
	doc, _ := v.template.Encoded(v.doc, e.Doc)
	v.fingerprints[id] = fingerprint{hashID(string(outbox.AppendHeaderValue(nil, e.Key))), hashID(doc)}
	return nil
}

// sameEvent reports whether a message can be the event of the candidate with that id. For a row that couldn't
// be decoded only the id is certain.
func (v *identity) sameEvent(id idHash, m backfill.Message) bool {
	if v == nil || m.DeadLetter == string(sink.Undecodable) {
		return true
	}
	row, candidate := v.fingerprints[id]
	if !candidate {
		return true
	}
	if v.keyed && row.key != hashID(outbox.HeaderKey(m.Header)) {
		return false
	}
	says, same := false, false
	// a column may stand in it more than once, in two forms
	v.template.Parse(m.Subject, func(column, encoded string) {
		if column == v.doc {
			says, same = true, same || row.doc == hashID(encoded)
		}
	})
	return !says || same
}
