package consumeradmin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	streams "github.com/outflowhq/outflow/sink/stream"
)

// metadataName is in the metadata of what an instance of package consumer reads with.
const metadataName = "outflow.consumer"

// Readers returns everybody who reads a stream, as far as it can be known: the consumers that have offsets in
// one of the databases, in whichever schema, or in the bucket, and all consumers that JetStream has.
//
// An instance of package consumer reads ahead of its offsets, so what it reads with counts for nothing. But
// it shows a consumer whose offsets are nowhere here: of that nothing is known.
func Readers(ctx context.Context, api *jsapi.Client, stream string, databases []postgres.Target) (
	all []streamretain.Reader, err error) {
	a := &Admin{Stream: stream, API: api}
	if a.JS, err = api.JetStream(); err != nil {
		return nil, err
	}
	live, err := a.stream(ctx)
	if err != nil {
		return nil, err
	}
	// Before the offsets are read: an instance has some before it reads.
	consumers, err := a.consumers(ctx)
	if err != nil {
		return nil, err
	}
	created := live.CachedInfo().Created
	for _, target := range databases {
		if all, err = a.inDatabaseOf(ctx, target, created, all); err != nil {
			return nil, err
		}
	}
	kv, err := openBucket(ctx, a.JS, a.Stream)
	if err != nil {
		return nil, err
	}
	if kv != nil { // one that was set back a moment ago may be at its former place in a replica that lags
		kv.leader = api
	}
	names, err := kv.names(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		doc, err := kv.load(ctx, name)
		if err != nil || doc == nil {
			return nil, errOr(err, "key %s of bucket %s was deleted meanwhile", name, kv.kv.Bucket())
		}
		r, err := a.readerOf(ctx, name, "bucket "+kv.kv.Bucket(), &doc.state, created)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	known := slices.Clone(all)
	for _, info := range consumers {
		if name := info.Config.Metadata[metadataName]; name != "" {
			is := func(r streamretain.Reader) bool { return r.Name == name }
			if !slices.ContainsFunc(known, is) {
				known = append(known, streamretain.Reader{Name: name})
				all = append(all, streamretain.Reader{Name: name, Why: "it reads the stream, and its " +
					"offsets are not in a database that was looked at: name that with --database"})
			}
			continue
		}
		r, err := a.plainReader(ctx, info, live.CachedInfo().State.LastSeq)
		if err != nil {
			return nil, err
		}
		if who := info.Config.Metadata[jsapi.MetadataReader]; who != "" {
			r.Why = who + " reads with it: " + r.Why
		}
		all = append(all, r)
	}
	return all, nil
}

func errOr(err error, format string, args ...any) error {
	if err != nil {
		return err
	}
	return fmt.Errorf(format, args...)
}

// listAttempts is how often the list of consumers is begun again because others came and went meanwhile.
const listAttempts = 10

// consumers lists the stream's consumers, all of them: in a cluster the list leaves out those whose leader
// does not answer. It comes in parts, by names. Each begins with the last one of the part before: where that
// has another place by now, one came or went before it, and another may have been left out.
func (a *Admin) consumers(ctx context.Context) (all []*jetstream.ConsumerInfo, err error) {
	failed := func(format string, args ...any) error {
		return fmt.Errorf("list the consumers of stream %s: %w", a.Stream, fmt.Errorf(format, args...))
	}
	for range listAttempts {
		all = nil
		for moved := false; !moved; {
			var page struct {
				jsapi.Answer
				Total     int                       `json:"total"`
				Consumers []*jetstream.ConsumerInfo `json:"consumers"`
				Missing   []string                  `json:"missing"`
			}
			from := max(len(all)-1, 0)
			err := a.API.Ask(ctx, "CONSUMER.LIST."+a.Stream, map[string]int{"offset": from}, &page)
			switch {
			case err != nil:
				return nil, failed("%w", err)
			case len(page.Missing) > 0:
				return nil, failed("nobody says where %s are: run it again", page.Missing)
			case len(all) > 0 && (len(page.Consumers) == 0 || page.Consumers[0].Name != all[from].Name):
				moved = true
				continue
			}
			known := len(all)
			if all = append(all[:from], page.Consumers...); len(all) >= page.Total {
				return all, nil
			}
			moved = len(all) == known
		}
	}
	return nil, failed("others came and went all the time: run it again")
}

// databaseTimeout is how long it may take to look into a database of consumers.
const databaseTimeout = 30 * time.Second

// inDatabaseOf adds the consumers of all schemas of a database.
func (a *Admin) inDatabaseOf(ctx context.Context, target postgres.Target, created time.Time,
	all []streamretain.Reader) ([]streamretain.Reader, error) {
	from := target.String()
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	defer progress.Wait(ctx, "waiting for the consumers' database: "+from)()
	conn, err := target.Connect(ctx, func(c *pgx.ConnConfig) {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	})
	if err != nil {
		return nil, err
	}
	defer postgres.Close(conn)
	from = postgres.Where(conn)
	err = seeing(ctx, conn, from, func(tx pgx.Tx) error {
		all, err = a.inSchemasOf(ctx, tx, from, created, all)
		return err
	})
	return all, err
}

// inSchemasOf is inDatabaseOf, in a transaction that sees all rows.
func (a *Admin) inSchemasOf(ctx context.Context, tx pgx.Tx, from string, created time.Time,
	all []streamretain.Reader) ([]streamretain.Reader, error) {
	rows, err := tx.Query(ctx, `SELECT n.nspname FROM pg_catalog.pg_class c
		JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
		WHERE c.relname OPERATOR(pg_catalog.=) 'outflow_consumer'
			AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,p}')
			AND c.relpersistence OPERATOR(pg_catalog.<>) 't' ORDER BY 1`)
	var schemas []string
	if err == nil {
		schemas, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil {
		return nil, fmt.Errorf("%s: look for consumers: %w", from, err)
	}
	for _, schema := range schemas {
		d := &database{conn: tx.Conn(), schema: schema, from: from}
		names, err := d.names(ctx, a.Stream)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			s, err := d.load(ctx, tx, name, free)
			if err != nil || s == nil {
				return nil, errOr(err, "%s: consumer %s was deleted meanwhile: run it again", from, name)
			}
			r, err := a.readerOf(ctx, name, from+", schema "+schema, s, created)
			if err != nil {
				return nil, err
			}
			all = append(all, r)
		}
	}
	return all, nil
}

// readerOf is a consumer of package consumer. created is when the stream was made.
func (a *Admin) readerOf(ctx context.Context, name, where string, s *state, created time.Time) (
	streamretain.Reader, error) {
	r := streamretain.Reader{Name: name, Why: "it has read nothing yet (" + where + ")"}
	if len(s.offsets) == 0 {
		return r, nil
	}
	same, err := a.isOf(ctx, s, created)
	if err != nil {
		return r, fmt.Errorf("stream %s: look for the message at an offset of consumer %s: %w", a.Stream,
			name, err)
	}
	if !same {
		r.Why = fmt.Sprintf("its offsets are of another stream, which was made anew or put back: say "+
			"from where it goes on with outflow consumer rewind %s (%s)", name, where)
		return r, nil
	}
	r.Done = s.lowest().Seq
	r.Why = fmt.Sprintf("its oldest offset is %d (%s)", r.Done, where)
	return r, nil
}

// isOf reports whether offsets are of this stream, as their consumer finds out when it starts: by the message
// at the newest of them, and where that is gone by when the stream was made.
func (a *Admin) isOf(ctx context.Context, s *state, created time.Time) (bool, error) {
	newest := slices.MaxFunc(s.offsets, func(a, b offset) int { return cmp.Compare(a.Seq, b.Seq) })
	if newest.Seq == 0 {
		return true, nil
	}
	m, err := a.API.Message(ctx, a.Stream, jsapi.MessageRequest{Seq: newest.Seq})
	if err != nil {
		return false, err
	}
	if m != nil && (newest.Due != 0 || newest.Pos.LSN != 0) {
		if streams.CutOf(m) != nil {
			return true, nil
		}
		header, err := nats.DecodeHeadersMsg(m.Header)
		if err != nil {
			return false, nil //nolint:nilerr // a message of somebody else
		}
		h, err := outbox.ParseHeader(header.Get(outbox.HeaderName))
		return err == nil && h.Pos == newest.Pos, nil
	}
	return s.created.IsZero() || s.created.Equal(created.Truncate(time.Microsecond)), nil
}

// plainReader is any other consumer. One with filters needs nothing before the next message of theirs.
func (a *Admin) plainReader(ctx context.Context, info *jetstream.ConsumerInfo, last uint64) (
	streamretain.Reader, error) {
	r := streamretain.Reader{Name: info.Name, Done: info.AckFloor.Stream}
	if text, ok := info.Config.Metadata[metadataRewind]; ok {
		var rec record
		if err := json.Unmarshal([]byte(text), &rec); err != nil {
			return r, fmt.Errorf("consumer %s: metadata %s: %w", info.Name, metadataRewind, err)
		}
		r.Done, r.Why = min(rec.To, rec.Acked), "a rewind of "+rec.Config.Durable+" was interrupted"
		return r, nil
	}
	r.Why = fmt.Sprintf("it has acknowledged everything up to %d", r.Done)
	filters := everything(filtersOf(&info.Config))
	if len(filters) == 0 {
		return r, nil
	}
	next := last + 1
	for _, filter := range filters {
		m, err := a.API.Message(ctx, a.Stream, jsapi.MessageRequest{Seq: r.Done + 1, Next: filter})
		if err != nil {
			return r, fmt.Errorf("stream %s: look for the next message of consumer %s: %w", a.Stream,
				info.Name, err)
		}
		if m != nil {
			next = min(next, m.Seq)
		}
	}
	if next > r.Done+1 {
		r.Done, r.Why = next-1, fmt.Sprintf("its filter has nothing up to %d that it has not acknowledged",
			next-1)
	}
	return r, nil
}
