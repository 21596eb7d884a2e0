package repair

import (
	"slices"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/sink"
)

// elsewhere reports whether the stream's events may come from other rows than those of a snapshot: from another table, or from WAL
// that this server does not have. Ids that count begin anew there. Everywhere else an id is the same event's, whatever its row holds by now.
func (f *finding) elsewhere(snap *replication.Snapshot) bool {
	if snap == nil || f.Record == nil {
		return false
	}
	switch f.original() {
	case "system_changed", "server_behind", "timeline_lost", "timeline_unknown", "divergence":
		return true
	}
	before := f.published()
	return before != 0 && before != snap.Table().OID
}

// sight is what tells events of the same id apart: key and document, as far as a message holds them. Of a nil one all are the same.
type sight struct {
	read  []string
	rows  *backfill.Rows
	keyed bool

	template *outbox.SubjectTemplate
	doc      string // the template's column that is the document; "": none

	events map[eventID]looks
}

// looks are a row's key and document in the form that its message has.
type looks struct{ key, doc eventID }

func newSight(cfg config.Config, l *wiring.Layout, snap *replication.Snapshot) (*sight, error) {
	v := &sight{keyed: l.Mapping.Keyed(), events: map[eventID]looks{}}
	names := []string{l.Mapping.Doc, l.Mapping.Actor, l.Mapping.Counter, l.Mapping.Key}
	slices.Sort(names)
	columns := snap.InWAL(slices.Compact(names))
	for _, c := range columns {
		v.read = append(v.read, c.Name)
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

// columns are those that row takes.
func (v *sight) columns() []string {
	if v == nil {
		return nil
	}
	return v.read
}

// row notes a candidate.
func (v *sight) row(id eventID, values [][]byte) error {
	if v == nil {
		return nil
	}
	e, err := v.rows.Event(values)
	if err != nil {
		return err
	}
	doc, _ := v.template.Encoded(v.doc, e.Doc)
	v.events[id] = looks{idOf(string(outbox.AppendHeaderValue(nil, e.Key))), idOf(doc)}
	return nil
}

// same reports whether a message can be of the candidate with that id. Of what could not be decoded nothing but the id is certain.
func (v *sight) same(id eventID, m backfill.Message) bool {
	if v == nil || m.DeadLetter == string(sink.Undecodable) {
		return true
	}
	row, candidate := v.events[id]
	if !candidate {
		return true
	}
	if v.keyed && row.key != idOf(outbox.HeaderKey(m.Header)) {
		return false
	}
	says, same := false, false
	v.template.Parse(m.Subject, func(column, encoded string) { // a column may stand in it more than once, in two forms
		if column == v.doc {
			says, same = true, same || row.doc == idOf(encoded)
		}
	})
	return !says || same
}
