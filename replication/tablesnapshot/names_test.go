package tablesnapshot

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
)

// TestAnOutboxMayHaveTheNameOfTheTemporaryTable: and its id any name.
func TestAnOutboxMayHaveTheNameOfTheTemporaryTable(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"outflow_known", "other", "t", "r", `od"d`} {
		for _, id := range []string{"id", "sum", "t", "k", `q"uote`} {
			t.Run(table+" "+id, func(t *testing.T) {
				d := newDatabase(t, pgtest.Server(t))
				quote := func(s string) string { return d.Text("SELECT quote_ident($1)", s) }
				d.Exec("CREATE TABLE public." + quote(table) + " (" + quote(id) +
					" text, doc_id text, seq_key text, payload text)")
				d.Exec("INSERT INTO public." + quote(table) + " VALUES ('a'), ('b')")
				cfg := d.cfg
				cfg.Table = "public." + quote(table)
				r, err := OpenReader(within(t), cfg)
				must.Succeed(t, err)
				defer r.Close()
				must.Succeed(t, r.LoadKnown(within(t), func(add func(...IDHash) error) error {
					return add(idSum("a"))
				}))
				snap, err := r.Snapshot(within(t), "")
				must.Succeed(t, err)
				q := Query{Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"}, ID: id,
					Columns: []string{id}, SkipKnown: true, Sorted: true}
				n, err := snap.Count(within(t), q)
				if err != nil || n != 1 {
					t.Errorf("%d rows, want 1: %v", n, err)
				}
			})
		}
	}
}

// TestReusedIDsAreCountedInAnOutboxOfAnyName as in one that is called outbox.
func TestReusedIDsAreCountedInAnOutboxOfAnyName(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"outbox2", "other", "f", "n", "t"} {
		d := newDatabase(t, pgtest.Server(t))
		d.Exec("CREATE TABLE public.former (id text, doc_id text, seq_key text, payload text)")
		d.Exec("CREATE TABLE public." + table + " (id text, doc_id text, seq_key text, payload text)")
		d.Exec("INSERT INTO public.former VALUES ('1', 'd', 'k', 'old'), ('2', 'd', 'k', 'old')")
		d.Exec("INSERT INTO public." + table + " VALUES ('1', 'd', 'k', 'new')")
		cfg := d.cfg
		cfg.Table = "public." + table
		snap, err := Open(within(t), cfg, "")
		must.Succeed(t, err)
		defer snap.Close()
		var oid uint32
		must.Succeed(t, snap.Querier().QueryRow(within(t), "SELECT 'public.former'::regclass::oid").
			Scan(&oid))
		_, err = snap.IncludeFormer(within(t), oid)
		must.Succeed(t, err)
		n, err := snap.CountReused(within(t), Query{Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"},
			ID: "id", Columns: []string{"id", "payload"}})
		if err != nil || n != 1 {
			t.Errorf("%s: %d ids are used again, want 1: %v", table, n, err)
		}
	}
}
