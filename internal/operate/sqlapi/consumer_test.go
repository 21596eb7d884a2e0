package sqlapi

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// newConsumer makes the functions, the tables and consumer c of four partitions.
func newConsumer(t *testing.T, s *pgserver.Server) *database {
	t.Helper()
	d := newDatabase(t, s, defaultTable)
	d.api()
	d.exec("SELECT outflow.create_tables()")
	d.exec("SELECT outflow.start('c', 's', '2026-01-01', '{>}', 'subject outbox.{doc_id}', 4)")
	return d
}

func (d *database) claim(instance string) []string {
	return d.claimAs(instance, "subject outbox.{doc_id}")
}

func (d *database) claimAs(instance, keying string) []string {
	d.t.Helper()
	return d.texts("SELECT partition || '@' || epoch FROM outflow.claim('c', $1, $2, '1 hour') "+
		"ORDER BY partition", instance, keying)
}

func (d *database) refuses(code, statement string, args ...any) {
	d.t.Helper()
	_, err := d.conn.Exec(d.t.Context(), statement, args...)
	var e *pgconn.PgError
	if !errors.As(err, &e) || e.Code != code {
		d.t.Errorf("%s %v: got %v, want %s", statement, args, err, code)
	}
}

func header(due string, n int) string {
	return "v=1 lsn=0/1 i=0 n=" + strconv.Itoa(n) + " of=9 due=" + due +
		" thru=0/1 pull=0 tl=1 sort=s id= key="
}

const advance = "SELECT outflow.advance('c', $1, $2, $3, $4, $5)"

// TestInstancesInSQLShareThePartitions: the shares are even, a member that expires loses its own, and one
// that leaves gives its own back.
func TestInstancesInSQLShareThePartitions(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		d := newConsumer(t, s)
		check := func(got []string, want ...string) {
			t.Helper()
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		check(d.claim("a"), "0@2", "1@2", "2@2", "3@2")
		check(d.texts("SELECT outflow.renew('c', 'a', '1 hour')::text"), "false")
		check(d.claim("b"))
		check(d.texts("SELECT outflow.renew('c', 'a', '1 hour')::text"), "true")
		check(d.claim("a"), "0@3", "1@3")
		check(d.texts("SELECT outflow.renew('c', 'b', '1 hour')::text"), "true")
		check(d.claim("b"), "2@4", "3@4")
		d.exec("UPDATE outflow.outflow_member SET expires = now() WHERE instance = 'a'")
		check(d.claim("b"), "0@5", "1@5", "2@5", "3@5")
		d.refuses("OF001", advance, 0, 3, 0, 1, header("0/5", 0))
		d.exec("SELECT outflow.leave('c', 'b')")
		check(d.claim("a"), "0@6", "1@6", "2@6", "3@6")
		// What an instance has given up because its handler hangs is free, though that one is there.
		check(d.claim("b"))
		d.exec("UPDATE outflow.outflow_mark SET owner = 'hung:a' WHERE partition = 3")
		check(d.texts("SELECT outflow.renew('c', 'b', '1 hour')::text"), "true")
		check(d.claim("b"), "3@7")
	})
}

// TestAMarkMovesUnderItsClaimOnly: another epoch or place, an order that goes back, a lost mark and a barrier
// are refused, and leave the mark where it is.
func TestAMarkMovesUnderItsClaimOnly(t *testing.T) {
	pgtest.Each(t, func(t *testing.T, s *pgserver.Server) {
		t.Parallel()
		d := newConsumer(t, s)
		d.claim("a")
		d.exec(advance, 0, 2, 0, 7, header("0/F", 1))
		d.refuses("OF001", advance, 0, 1, 7, 8, header("0/F", 2))
		d.refuses("OF001", advance, 0, 2, 0, 8, header("0/F", 2))
		d.refuses("22023", advance, 0, 2, 7, 7, header("0/F", 2))
		d.refuses("22023", advance, 0, 2, 7, 8, "v=2")
		d.refuses("OF003", advance, 0, 2, 7, 8, header("0/F", 1))
		d.refuses("OF003", advance, 0, 2, 7, 8, header("0/E", 5))
		d.exec(advance, 0, 2, 7, 8, header("0/10", 0)) // a number, not a text
		d.exec("SELECT outflow.lost('c', 1, 2, 0)")
		d.refuses("OF003", advance, 1, 2, 0, 8, header("0/10", 0))
		d.exec("UPDATE outflow.outflow_consumer SET wanted_keying = 'k', wanted_partitions = 2, barrier = 9")
		d.refuses("OF002", advance, 2, 2, 0, 10, header("0/11", 0))
		got := d.texts("SELECT seq::text FROM outflow.outflow_mark ORDER BY partition")
		if !slices.Equal(got, []string{"8", "0", "0", "0"}) {
			t.Errorf("marks %q", got)
		}
	})
}

// TestAProgramThatFreezesLosesItsLocks: the server ends a transaction that holds what others wait for, after
// a time that the session may have set.
func TestAProgramThatFreezesLosesItsLocks(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	d.claim("a")
	for call, want := range map[string]string{
		"fence('c', 0, 2, 0)": "35s 35s 35s",
		"start('c', 's', '2026-01-01', '{>}', 'subject outbox.{doc_id}', 4)": "5s 5s 5s",
		"claim('c', 'b', 'subject outbox.{doc_id}', '1 hour')":               "5s 5s 5s",
		"renew('c', 'a', '1 hour')":                                          "5s 5s 5s",
		"leave('c', 'b')":                                                    "5s 5s 5s",
	} {
		// In one statement, which none of them ends.
		bounds := "SELECT concat_ws(' ', current_setting('lock_timeout'), " +
			"current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout')) " +
			"FROM (VALUES (1)) one LEFT JOIN outflow." + call + " ON true"
		if got := d.texts(bounds); !slices.Equal(got, []string{want}) {
			t.Errorf("%s: lock, statement, idle %q, want %q", call, got, want)
		}
		d.exec("SET statement_timeout = '9min'")
		if got := d.texts(bounds); !slices.Equal(got, []string{strings.Fields(want)[0] + " 9min " +
			strings.Fields(want)[2]}) {
			t.Errorf("%s: lock, statement, idle %q, want the session's statement_timeout", call, got)
		}
		d.exec("RESET statement_timeout")
	}
}

// TestAnotherLayoutBeginsInSQLWhenAllMarksAreAtTheBarrier, and not before.
func TestAnotherLayoutBeginsInSQLWhenAllMarksAreAtTheBarrier(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	d.claim("a")
	for p := range 3 {
		d.exec(advance, p, 2, 0, 9, header("0/9", 0))
	}
	d.exec("UPDATE outflow.outflow_consumer SET wanted_keying = 'k', wanted_partitions = 2, barrier = 9")
	if got := d.claim("a"); len(got) != 4 {
		t.Errorf("claimed %q while a mark was before the barrier", got)
	}
	d.exec(advance, 3, 3, 0, 9, header("0/9", 0))
	d.refuses("OF004", "SELECT outflow.claim('c', 'a', NULL, '1 hour')")
	d.refuses("OF004", "SELECT outflow.claim('c', 'a', 'subject outbox.{doc_id}', '1 hour')")
	if got := d.claimAs("a", "k"); !slices.Equal(got, []string{"0@5", "1@5"}) {
		t.Errorf("claimed %q", got)
	}
	got := d.texts("SELECT concat_ws(' ', seq, due, keying, wanted_keying, barrier) " +
		"FROM outflow.outflow_mark, outflow.outflow_consumer")
	if !slices.Equal(got, []string{"9 0/9 k", "9 0/9 k"}) {
		t.Errorf("marks %q", got)
	}
}

// TestAClaimLeavesAPartitionAloneWhoseTransactionIsOpen: what its claimer reads is final.
func TestAClaimLeavesAPartitionAloneWhoseTransactionIsOpen(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	d.claim("a")
	other := d.connect()
	tx, err := other.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), advance, 2, 2, 0, 5, header("0/9", 0)); err != nil {
		t.Fatal(err)
	}
	d.exec("UPDATE outflow.outflow_member SET expires = now()")
	if got := d.claim("b"); !slices.Equal(got, []string{"0@3", "1@3", "3@3"}) {
		t.Errorf("claimed %q", got)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.exec("INSERT INTO outflow.outflow_mark (name, source, partition, epoch, seq, due, n, lsn, i) " +
		"SELECT name, 'replay', partition, epoch, 0, '0/0', 0, '0/0', 0 FROM outflow.outflow_mark")
	if tx, err = other.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM outflow.outflow_mark WHERE source = 'replay' AND "+
		"partition = 1 FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if got := d.texts("SELECT partition::text FROM outflow.claim('c', 'b', 'subject outbox.{doc_id}', " +
		"'1 hour') WHERE source = 'live' ORDER BY 1"); !slices.Equal(got, []string{"0", "2", "3"}) {
		t.Errorf("claimed %q beside a replay", got)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := d.texts("SELECT seq::text FROM outflow.claim('c', 'b', 'subject outbox.{doc_id}', '1 hour') " +
		"WHERE partition = 2 AND source = 'live'")
	if !slices.Equal(got, []string{"5"}) {
		t.Errorf("mark %q", got)
	}
}

// TestAReleasedDocumentComesInItsOrder: what an operator releases comes event by event, and what fails is
// parked again with all that is behind it.
func TestAReleasedDocumentComesInItsOrder(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	d.claim("a")
	park := "SELECT outflow.park('c', $1, 'd', 'outbox.d', jsonb_build_object('Outflow', " +
		"jsonb_build_array($2::text)), '{}', now(), 'id', $3, 1)"
	d.exec(park, 3, header("0/3", 0), "broken")
	d.exec(park, 4, header("0/3", 1), nil)
	d.exec(park, 4, header("0/3", 1), nil)
	partition := "(outflow.hash('d') % 4)::int"
	next := func() string {
		t.Helper()
		return strings.Join(d.texts("SELECT concat_ws(' ', seq, skip, ord) FROM "+
			"outflow.released('c', "+partition+", 2, 0)"), ",")
	}
	if got := next(); got != "" || !slices.Equal(d.texts("SELECT outflow.parked('c', 'd')::text"),
		[]string{"true"}) {
		t.Errorf("%q is released, or nothing is parked", got)
	}
	d.refuses("OF001", "SELECT outflow.unpark('c', 1)")
	d.exec("UPDATE outflow.outflow_parked SET release = 'skip' WHERE seq = 3")
	if got := next(); got != "3 t 1" {
		t.Errorf("got %q", got)
	}
	d.exec("SELECT outflow.unpark('c', 1)")
	if got := next(); !strings.HasPrefix(got, "4 f ") {
		t.Errorf("got %q", got)
	}
	// A replayed event that has failed since is before it, and not released.
	d.exec("INSERT INTO outflow.outflow_parked (name, document, hash, source, seq, subject, headers, " +
		"data, published_at, position, event_id, cause) SELECT name, document, hash, 'replay', 1, " +
		"subject, headers, data, published_at, position, event_id, 'poison' FROM outflow.outflow_parked")
	if got := next(); got != "" {
		t.Errorf("%q is released before what is in front of it", got)
	}
	d.exec("DELETE FROM outflow.outflow_parked WHERE source = 'replay'")
	d.exec("SELECT outflow.repark('c', ord, 'again', 2) FROM outflow.outflow_parked")
	if got := next(); got != "" {
		t.Errorf("%q is released", got)
	}
	d.refuses("OF001", "SELECT outflow.released('c', 0, 1, 0)")
}

// TestTakingAnEventMovesTheMarkAndParksWhatHasToBe: true once for each event that is to have its effects. One
// that has failed is parked, and what follows in its document as well.
func TestTakingAnEventMovesTheMarkAndParksWhatHasToBe(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	d.claim("a")
	const take = "SELECT outflow.take('c', (outflow.hash('d') % 4)::int, 2, $1, $2, 'd', 'outbox.d', " +
		"jsonb_build_object('Outflow', jsonb_build_array($3::text)), '{}', now(), $4, $5)::text"
	if got := d.texts(take, 0, 3, header("0/3", 0), nil, 0); !slices.Equal(got, []string{"true"}) {
		t.Errorf("the first event: %q", got)
	}
	d.refuses("OF001", take, 0, 3, header("0/3", 0), nil, 0)
	for i, failure := range []any{"broken", nil, "broken as well, but it comes behind"} {
		got := d.texts(take, 3+i, 4+i, header("0/4", i), failure, i)
		if !slices.Equal(got, []string{"false"}) {
			t.Errorf("event %d, failed with %v: %q", 4+i, failure, got)
		}
	}
	got := d.texts("SELECT concat_ws(' ', seq, cause, error) FROM outflow.outflow_parked ORDER BY ord")
	if want := []string{"4 poison broken", "5 behind ", "6 behind "}; !slices.Equal(got, want) {
		t.Errorf("parked are %q, want %q", got, want)
	}
}

// TestAStreamIsToldByItsTimeOfCreation: drivers round it to milliseconds or microseconds, or cut it.
func TestAStreamIsToldByItsTimeOfCreation(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	const start = "SELECT outflow.start('c', 's', $1::text::timestamptz, '{>}', 'subject outbox.{doc_id}', 4)"
	d.exec(start, "2026-01-01 00:00:00.0009")
	d.exec(start, "2025-12-31 23:59:59.9991")
	d.refuses("OF004", start, "2026-01-01 00:00:00.01")
}

// TestTheHashInSQLIsThatOfThePackage, with documents that are not ASCII; the page has the same vectors.
func TestTheHashInSQLIsThatOfThePackage(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	page, err := os.ReadFile("../../../docs/consume-any-language.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range []string{"", "a", "foobar", "note-1", "Zürich", "日本"} {
		h := fnv.New32a()
		_, _ = h.Write([]byte(document)) // cannot fail
		want := strconv.FormatUint(uint64(h.Sum32()), 10)
		if got := d.texts("SELECT outflow.hash($1)::text", document); !slices.Equal(got, []string{want}) {
			t.Errorf("%q: got %q, want %s", document, got, want)
		}
		row := fmt.Sprintf("| `%q` | %s | %d |", document, want, h.Sum32()%8)
		if !strings.Contains(string(page), row) {
			t.Errorf("the page lacks the vector %s", row)
		}
	}
}

// TestConsumersInSQLHaveTheRightsOfTheCaller: EXECUTE alone moves nothing, and nobody's objects stand in for
// PostgreSQL's own.
func TestConsumersInSQLHaveTheRightsOfTheCaller(t *testing.T) {
	t.Parallel()
	d := newConsumer(t, pgtest.Server(t))
	role := "consumer_" + d.texts("SELECT current_database()::text")[0]
	d.exec("CREATE ROLE " + role)
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), d.url)
		if err == nil {
			_, err = conn.Exec(context.Background(), "DROP OWNED BY "+role+" CASCADE; DROP ROLE "+role)
			conn.Close(context.Background()) //nolint:errcheck // the test is over
		}
		if err != nil {
			t.Error(err)
		}
	})
	d.exec("GRANT USAGE ON SCHEMA outflow TO " + role)
	d.exec("CREATE SCHEMA evil AUTHORIZATION " + role)
	d.exec("SET ROLE " + role)
	d.refuses("42501", "SELECT outflow.claim('c', 'a', '', '1 hour')")
	d.exec("RESET ROLE")
	d.exec("GRANT SELECT, INSERT, UPDATE, DELETE ON outflow.outflow_consumer, outflow.outflow_member, " +
		"outflow.outflow_mark, outflow.outflow_parked TO " + role)
	d.exec("CREATE FUNCTION evil.wrong(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'")
	d.exec("CREATE OPERATOR evil.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.wrong)")
	d.exec("SET search_path = evil, pg_catalog")
	d.exec("SET ROLE " + role)
	d.claim("a")
	d.refuses("OF001", advance, 0, 1, 0, 1, header("0/1", 0))
	d.exec(advance, 0, 2, 0, 1, header("0/1", 0))
	d.exec("RESET ROLE")
	got := d.texts("SELECT proname::text FROM pg_catalog.pg_proc WHERE pronamespace = " +
		"'outflow'::regnamespace AND (prosecdef OR proconfig[1] <> 'search_path=pg_catalog, pg_temp')")
	if len(got) > 0 {
		t.Errorf("%q have the rights of their owner, or no search_path", got)
	}
}
