package consumeradmin

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestReadersAreAllThatReadTheStream: a consumer counts by its slowest partition, one whose rewind was
// interrupted from where it is to go on, and one that was set up and has read nothing from the beginning.
func TestReadersAreAllThatReadTheStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`UPDATE outflow_mark SET lsn = ('0/' || to_hex(seq * 16))::pg_lsn`)
	text, err := json.Marshal(record{Config: jetstream.ConsumerConfig{Durable: "orders"}, Was: 15, Acked: 12,
		To: 4})
	must(t, err)
	_, err = w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "orders_rewinding",
		AckPolicy:     jetstream.AckExplicitPolicy,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 16,
		Metadata: map[string]string{metadataRewind: string(text)}})
	must(t, err)
	w.exec(`INSERT INTO outflow_consumer (name, stream, filters, keying, partitions, epoch)
		VALUES ('fresh', 'OUTBOX', '{>}', 'x', 0, 0), ('elsewhere', 'OTHER', '{>}', 'x', 4, 0)`)
	readers := func(database string) ([]string, error) {
		all, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{{URL: database}})
		var said []string
		for _, r := range all {
			said = append(said, fmt.Sprintf("%s %d", r.Name, r.Done))
		}
		slices.Sort(said)
		return said, err
	}
	got, err := readers(w.url)
	if want := "fresh 0, orders_rewinding 4, texts 10"; err != nil || strings.Join(got, ", ") != want {
		t.Errorf("%v, %v, want %s", got, err, want)
	}
	w.exec(`CREATE SCHEMA hidden; CREATE TABLE hidden.outflow_consumer ()`)
	if got, err := readers(w.url); err == nil {
		t.Errorf("tables that can't be read were passed over: %v", got)
	}
}

// reader makes a role that may read tables, and returns the database as it is for that role.
func (w *world) reader(tables string) postgres.Target {
	w.t.Helper()
	role := "reads_" + strings.ToLower(rand.Text())
	w.exec(`CREATE ROLE ` + role + ` LOGIN`)
	w.t.Cleanup(func() {
		w.DB.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) //nolint:errcheck // over
	})
	w.exec(`GRANT SELECT ON ` + tables + ` TO ` + role)
	c, err := pgx.ParseConfig(w.url)
	must(w.t, err)
	return postgres.Target{Pooled: true, URL: fmt.Sprintf("host=%s port=%d dbname=%s user=%s", c.Host, c.Port,
		c.Database, role)}
}

// shadowed makes an operator that finds nothing equal, and returns the database with a search_path that has
// it before that of pg_catalog.
func (w *world) shadowed() postgres.Target {
	w.t.Helper()
	w.exec(`CREATE FUNCTION public.differ(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false'`)
	w.exec(`CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = public.differ)`)
	c, err := pgx.ParseConfig(w.url)
	must(w.t, err)
	return postgres.Target{Pooled: true, URL: fmt.Sprintf("host=%s port=%d dbname=%s user=%s "+
		"password='%s' search_path='public, pg_catalog'", c.Host, c.Port, c.Database, c.User, c.Password)}
}

// TestWhatReadsIsNamed: the consumer that an instance reads with is no consumer of its own, and has no marks.
// One that a command of outflow reads with says so.
func TestWhatReadsIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`UPDATE outflow_mark SET lsn = ('0/' || to_hex(seq * 16))::pg_lsn`)
	for _, of := range []string{"texts", "search"} {
		_, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Name: of + "-1",
			AckPolicy: jetstream.AckNonePolicy, InactiveThreshold: time.Hour,
			Metadata: map[string]string{metadataName: of, metadataOffsets: InPostgres}})
		must(t, err)
	}
	notes, why := map[string]string{}, ""
	must(t, jsapi.ReadStream(t.Context(), w.JS, "OUTBOX", jetstream.OrderedConsumerConfig{}, 0,
		func(jetstream.Msg, *jetstream.MsgMetadata) error {
			all, err := w.List(t.Context())
			must(t, err)
			for _, c := range all {
				name := c.Name
				if c.Offsets == Plain {
					name = "a command"
				}
				notes[name] = c.Note
			}
			readers, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{{URL: w.url}})
			must(t, err)
			for _, r := range readers {
				why += r.Why + "\n"
			}
			return jsapi.ErrStop
		}))
	want := map[string]string{
		"texts": "", "texts-1": "an instance of consumer texts reads with it",
		"search-1": "an instance of consumer search reads with it, whose marks are not here: give its " +
			"database with --database",
		"a command": "a command of outflow reads with it",
	}
	if !maps.Equal(notes, want) {
		t.Errorf("%q", notes)
	}
	if !strings.Contains(why, "a command of outflow reads with it: it has acknowledged everything up to") {
		t.Error(why)
	}
}

// TestAConsumerThatAPolicyHidesIsNotPassedOver: a database may have row-level security on all tables, and
// then whoever may read, and has no policy, reads nothing.
func TestAConsumerThatAPolicyHidesIsNotPassedOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	target := w.reader("outflow_consumer, outflow_mark, outflow_member")
	all, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{target})
	if err != nil || len(all) != 1 {
		t.Fatalf("%v, %v", all, err)
	}
	w.exec(`ALTER TABLE outflow_consumer ENABLE ROW LEVEL SECURITY`)
	if all, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{target}); err == nil {
		t.Errorf("there are %v", all)
	} else if f := outbox.FaultOf(err); f == nil || f.Code != "no_right" {
		t.Error(err)
	}
}

// TestAConsumerThatAnOperatorHidesIsSeen: a role's search_path may have a schema before pg_catalog, in which
// others have objects.
func TestAConsumerThatAnOperatorHidesIsSeen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	all, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{w.shadowed()})
	if err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
}

// TestOffsetsInAnotherStreamCountForNothing: the stream was made anew while a consumer was down. Its offsets
// are sequences of the stream that is gone: it has none of what lies at these in the new one.
func TestOffsetsInAnotherStreamCountForNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	readers := func() string {
		t.Helper()
		all, err := Readers(t.Context(), w.API, "OUTBOX", []postgres.Target{{URL: w.url}})
		must(t, err)
		var said []string
		for _, r := range all {
			said = append(said, fmt.Sprintf("%s %d %s", r.Name, r.Done, r.Why))
		}
		return strings.Join(said, ", ")
	}
	w.exec(`UPDATE outflow_mark SET lsn = ('0/' || to_hex(seq * 16))::pg_lsn WHERE source = 'live'`)
	made := w.live.CachedInfo().Created
	w.exec(`UPDATE outflow_consumer SET stream_created = $1`, made)
	if got := readers(); !strings.HasPrefix(got, "texts 10 its oldest offset is 10") {
		t.Errorf("of the same stream: %s", got)
	}
	// one that was put back has another time, and the same messages
	w.exec(`UPDATE outflow_consumer SET stream_created = $1`, made.Add(-time.Hour))
	if got := readers(); !strings.HasPrefix(got, "texts 10 its oldest offset is 10") {
		t.Errorf("of a stream that was put back: %s", got)
	}
	w.exec(`UPDATE outflow_mark SET lsn = '0/99' WHERE seq = 18`)
	if got := readers(); !strings.HasPrefix(got, "texts 0 ") {
		t.Errorf("of a stream with another message at its offset: %s", got)
	}
	w.exec(`UPDATE outflow_mark SET seq = 1000 + seq, lsn = '0/99' WHERE source = 'live'`)
	if got := readers(); !strings.HasPrefix(got, "texts 0 ") {
		t.Errorf("of a stream that is shorter and was made anew: %s", got)
	}
}

// TestTheListOfConsumersHasAllOfThem: the server gives so many at a time, by their names. One that goes
// between two parts moves all behind it forward.
func TestTheListOfConsumersHasAllOfThem(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	nc := w.API.NATS()
	const most = 256
	for n := range most + 2 {
		_, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
			Durable: fmt.Sprintf("c%03d", n), AckPolicy: jetstream.AckExplicitPolicy, MemoryStorage: true})
		must(t, err)
	}
	changes := []func() error{
		func() error { return w.live.DeleteConsumer(t.Context(), "c000") },
		func() error {
			_, err := w.live.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "b",
				AckPolicy: jetstream.AckExplicitPolicy})
			return err
		},
	}
	relay, err := nc.Subscribe("relayed.API.>", func(m *nats.Msg) {
		subject := strings.Replace(m.Subject, "relayed", "$JS", 1)
		if strings.Contains(subject, "CONSUMER.LIST") && !strings.Contains(string(m.Data), `"offset":0`) &&
			len(changes) > 0 {
			if err := changes[0](); err != nil {
				t.Error(err)
			}
			changes = changes[1:]
		}
		answer, err := nc.Request(subject, m.Data, time.Minute)
		if err == nil {
			err = m.Respond(answer.Data)
		}
		if err != nil {
			t.Error(err)
		}
	})
	must(t, err)
	t.Cleanup(func() { _ = relay.Unsubscribe() })
	admin := &Admin{Stream: "OUTBOX", API: jsapi.New(nc, "relayed.API")}
	all, err := admin.consumers(t.Context())
	must(t, err)
	var names []string
	for _, info := range all {
		names = append(names, info.Name)
	}
	want := []string{"b"}
	for n := range most + 1 {
		want = append(want, fmt.Sprintf("c%03d", n+1))
	}
	if !slices.Equal(names, want) {
		t.Errorf("%d of %d consumers: the end is %v", len(names), len(want), names[len(names)-3:])
	}
}
