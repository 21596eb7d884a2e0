package publish

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// committed is a transaction as pgoutput tells of it: where it ends and when it was made, both at its origin,
// and its rows.
type committed struct {
	end  uint64
	time int64
	rows []string
}

// peek decodes what a slot holds. Where replicated is set, position and time are those of the Origin message
// and of Begin, and own transactions are left out.
func peek(t *testing.T, conn *pgx.Conn, replicated bool) (all []committed) {
	t.Helper()
	rows, err := conn.Query(t.Context(), "SELECT data FROM pg_logical_slot_peek_binary_changes('reader', "+
		"NULL, NULL, 'proto_version', '1', 'publication_names', 'replicated')")
	harness.Must(t, err)
	messages, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	harness.Must(t, err)
	var tx committed
	for _, m := range messages {
		switch m[0] {
		case 'B':
			tx = committed{time: int64(binary.BigEndian.Uint64(m[9:]))}
		case 'O':
			tx.end = binary.BigEndian.Uint64(m[1:])
		case 'I':
			tx.rows = append(tx.rows, string(m[5:]))
		case 'C':
			if !replicated {
				tx.end = binary.BigEndian.Uint64(m[10:])
			}
			if tx.end > 0 && tx.rows != nil {
				all = append(all, tx)
			}
		}
	}
	return all
}

// TestAReplicaHasPositionTimeAndRowsOfTheOrigin: all that the order is made of but logical messages can be
// read on a cluster to which the rows were replicated, also
// when what applies them is killed meanwhile.
func TestAReplicaHasPositionTimeAndRowsOfTheOrigin(t *testing.T) {
	t.Parallel()
	for _, major := range pgtest.Majors(t) {
		t.Run(fmt.Sprint("postgres-", major), func(t *testing.T) {
			t.Parallel()
			var conns [2]*pgx.Conn
			var urls [2]string
			for i := range conns {
				pg := pgtest.Own(t, major)
				url, err := pg.CreateDatabase(t.Context(), "app")
				harness.Must(t, err)
				urls[i], conns[i] = url, harness.Connect(t, url)
				harness.Exec(t, conns[i], "CREATE TABLE outbox (id int, doc_id text, payload text)")
				harness.Exec(t, conns[i], "CREATE PUBLICATION replicated FOR TABLE outbox")
				harness.Exec(t, conns[i], "SELECT pg_create_logical_replication_slot('reader', 'pgoutput')")
			}
			home, other := conns[0], conns[1]
			harness.Exec(t, other, fmt.Sprintf("CREATE SUBSCRIPTION home CONNECTION '%s' "+
				"PUBLICATION replicated WITH (copy_data = false)", urls[0]))
			const commits = 100
			for n := range commits {
				harness.Exec(t, home, "INSERT INTO outbox SELECT $1, 'doc ' || i, repeat('x', 100 * i) FROM "+
					"generate_series(1, 1 + $1 % 5) i", n)
				harness.Exec(t, other, "INSERT INTO outbox VALUES (-1, 'of the other', '')")
				if n%20 == 10 { // the apply worker dies, and applies again what it had not said to be there
					harness.Exec(t, other, "SELECT pg_terminate_backend(pid) FROM pg_stat_subscription "+
						"WHERE pid IS NOT NULL")
				}
			}
			want := peek(t, home, false)
			if len(want) != commits {
				t.Fatalf("%d transactions at home", len(want))
			}
			harness.Eventually(t, "all is replicated", func() error {
				if n := len(peek(t, other, true)); n < commits {
					return fmt.Errorf("%d transactions", n)
				}
				return nil
			})
			for i, tx := range peek(t, other, true) {
				if i == len(want) || tx.end != want[i].end || tx.time != want[i].time ||
					!slices.Equal(tx.rows, want[i].rows) {
					t.Fatalf("transaction %d is %x at %d with %d rows, at home %+v", i, tx.end, tx.time,
						len(tx.rows), want[min(i, len(want)-1)])
				}
			}
		})
	}
}
