package e2e

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
)

// TestCatchUpBySQL switches back and forth between the two ways to read: one of two outflows on two slots of one database is killed again
// and again and finds a backlog each time that it reads by SQL, while writers go on; the other one only streams. Their streams are equal
// byte by byte.
func TestCatchUpBySQL(t *testing.T) {
	const horizon, ops = 20 * time.Millisecond, 12_000
	seed := uint64(number(t, "OUTFLOW_TEST_SEED", int(time.Now().UnixNano()%1e9)))
	t.Logf("seed %d", seed)
	for _, major := range pgtest.Majors(t) {
		pg := pgtest.Own(t, major, "track_commit_timestamp=on")
		url, err := pg.CreateDatabase(t.Context(), "traces")
		if err != nil {
			t.Fatal(err)
		}
		nats, twinNATS := natstest.Process(t), natstest.Process(t)
		victim := newOutflow(t, url, nats.URL(), "victim", "POSTGRES_CATCH_UP=64KiB")
		twin := newOutflow(t, url, twinNATS.URL(), "twin", "POSTGRES_CATCH_UP=0")
		victim.init()
		twin.init()
		twin.start()
		conn := db(t, url)
		mustExec(t, conn, `CREATE PROCEDURE backlog(round int) LANGUAGE plpgsql AS $$
			BEGIN
				FOR n IN 1 .. 600 LOOP
					INSERT INTO outbox (doc_id, actor_id, counter, payload)
						VALUES ('backlog' || n % 20, 'b', round * 1000 + n, jsonb_build_object('op', repeat('x', n)));
					COMMIT;
				END LOOP;
			END $$`)
		l := startLoad(t, url, traces(t, ops), 4, 1500, seed)
		rnd := rand.New(rand.NewPCG(seed, uint64(major)))

		// A start that the machine stood still for streams the backlog: that is right as well, and does not count here.
		const begins, ends = "reading the backlog by SQL", "the backlog was read by SQL"
		for round := 0; strings.Count(victim.log.String(), ends) < 3 || strings.Count(victim.log.String(), begins) < 6; round++ {
			if round == 60 {
				t.Fatal("the backlog is streamed each time")
			}
			mustExec(t, conn, "CALL backlog($1)", round)
			begun, ended := strings.Count(victim.log.String(), begins), strings.Count(victim.log.String(), ends)
			proved := strings.Count(victim.log.String(), "session proved")
			victim.start()
			until := []string{begins, ends, "session proved"}[rnd.IntN(3)] // then it is killed
			eventually(t, until, func() error {
				log := victim.log.String()
				sql, running := strings.Count(log, begins) > begun, strings.Count(log, "session proved") > proved
				switch {
				case until == begins && sql, until == ends && strings.Count(log, ends) > ended, until != begins && until != ends && running:
					return nil
				case running && !sql:
					return nil
				}
				return errors.New("not yet")
			})
			victim.kill()
		}
		victim.start()
		l.wait(t)
		var events int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&events); err != nil {
			t.Fatal(err)
		}
		awaitMessages(t, js(t, nats.URL()), victim.stream, events)
		awaitMessages(t, js(t, twinNATS.URL()), twin.stream, events)
		compareTwins(t, url, nats.URL(), twinNATS.URL(), victim.stream, horizon)
		if strings.Contains(twin.log.String(), begins) {
			t.Error("the twin read by SQL")
		}
		if victim.term() != 0 || twin.term() != 0 {
			t.Error("the stop was not clean")
		}
	}
}
