package replication

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/pgtest"
	"github.com/outflowhq/outflow/outbox"
)

// Where the stream starts between two records, at the header of a page, the commit behind it is in the last chunk and in the stream. It
// is brought once.
func TestSeamBetweenTwoRecords(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	d.exec("SET synchronous_commit = off")
	var at string // a commit that begins a page: one in a thousand does
	for tries := 0; at == ""; tries++ {
		if tries == 20 {
			t.Skip("no commit begins a page")
		}
		d.exec(`DO $$ BEGIN FOR i IN 1..2000 LOOP
			INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('d', 'a', i, to_jsonb(repeat('x', i % 50))); COMMIT;
		END LOOP; END $$`)
		at = d.text(fmt.Sprintf(`SELECT coalesce(max(('0/0'::pg_lsn + ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint)::text), '')
			FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL, 'proto_version', '1', 'publication_names', 'outflow')
			WHERE get_byte(data, 0) = ascii('B') AND ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint %% %d = %d`, walPage, shortHeader), d.cfg.Slot)
	}
	commit, err := outbox.ParseLSN(at)
	if err != nil {
		t.Fatal(err)
	}
	d.exec("SELECT pg_logical_emit_message(true, 'end', '')")
	d.cfg.CatchUp = bySQL()
	d.cfg.CatchUp.copied = func(b *backlog) { b.upTo = commit - shortHeader/2 }
	s := d.start(d.confirmed())
	if s.streaming().backlog == nil {
		t.Fatal("the backlog is streamed")
	}
	seen := map[string]int{} // commits with rows, by their message; and rows without one
	rows := 0
	ctx := within(t)
	for end := false; !end; {
		select {
		case b, ok := <-s.Batches():
			if !ok {
				t.Fatal(s.Err())
			}
			for _, m := range b.Messages {
				switch {
				case m.Keepalive:
				case m.Data[0] == 'I':
					rows++
				case m.Data[0] == 'C':
					if rows > 0 {
						seen[string(m.Data)] += rows
					}
					rows = 0
				case m.Data[0] == 'M':
					end = end || strings.HasPrefix(string(m.Data[10:]), "end\x00")
				}
			}
			b.Release()
		case <-ctx.Done():
			t.Fatal("the end does not come")
		}
	}
	for c, n := range seen {
		if n != 1 {
			t.Errorf("%d rows of the commit at %v", n, endOf(c))
		}
	}
	if n := fmt.Sprint(len(seen)); n != d.text("SELECT count(*)::text FROM outbox") || s.streaming().backlog.seam.given <= commit {
		t.Errorf("%s commits, the backlog was read up to %v, the commit begins at %v", n, s.streaming().backlog.seam.given, commit)
	}
}
