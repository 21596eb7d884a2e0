package consumeradmin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// EraseParked deletes parked events that is names from the databases of consumers of these streams, or only
// counts them. Where the first event of a document goes, for which the others wait, they are to be released.
// hit is called behind each consumer that lost some.
func EraseParked(ctx context.Context, api *jsapi.Client, streams []string, databases []postgres.Target,
	erase bool, is func(*erasure.Parked) bool, hit func()) (found erasure.FoundParked, err error) {
	names := map[string]bool{} // of consumers in a database
	for _, target := range databases {
		if err := eraseIn(ctx, target, streams, erase, is, hit, &found, names); err != nil {
			return found, err
		}
	}
	for _, stream := range streams {
		a := &Admin{Stream: stream, API: api}
		readers, err := a.consumers(ctx)
		if err != nil {
			return found, err
		}
		for _, info := range readers {
			if name := info.Config.Metadata[metadataName]; name != "" && !names[name] {
				names[name] = true
				found.Unseen = append(found.Unseen, fmt.Sprintf("what consumer %s has parked: it is in none "+
					"of the databases that were looked at (--database)", name))
			}
		}
	}
	return found, nil
}

func eraseIn(ctx context.Context, target postgres.Target, streams []string, erase bool,
	is func(*erasure.Parked) bool, hit func(), found *erasure.FoundParked, names map[string]bool) error {
	from := target.String()
	defer progress.Wait(ctx, "waiting for the consumers' database: "+from)()
	conn, err := target.Connect(ctx, func(c *pgx.ConnConfig) {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	})
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	from = postgres.Where(conn)
	found.Seen = append(found.Seen, from)
	var schemas []parkedSchema
	if err := seeing(ctx, conn, from, func(tx pgx.Tx) error {
		if schemas, err = parkedSchemas(ctx, tx); err != nil {
			return fmt.Errorf("%s: look for consumers: %w", from, err)
		}
		return nil
	}); err != nil {
		return err
	}
	for _, s := range schemas {
		if !s.trusted {
			found.Unseen = append(found.Unseen, fmt.Sprintf("%s, schema %s: outflow_parked belongs to role "+
				"%s, whose triggers would run with the rights of this one: connect as %[3]s", from, s.name,
				s.owner))
			continue
		}
		d := &database{conn: conn, schema: s.name, from: from}
		err := d.eraseFrom(ctx, streams, erase, is, hit, found, names)
		var e *pgconn.PgError
		if f := outbox.FaultOf(err); f != nil && f.Code == "no_right" && target.Setting == DefaultDatabase &&
			errors.As(err, &e) && e.Where == "" { // and no trigger lacks one
			found.Unseen = append(found.Unseen, fmt.Sprintf("%s, schema %s: the role may not look into it: "+
				"give the database with --database, as a role that may", from, s.name))
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// DefaultDatabase is the setting of the database that is looked into where none was named.
const DefaultDatabase = "postgres.url"

// eraseFrom erases from one schema.
func (d *database) eraseFrom(ctx context.Context, streams []string, erase bool, is func(*erasure.Parked) bool,
	hit func(), found *erasure.FoundParked, names map[string]bool) error {
	for _, stream := range streams {
		var all []string
		if err := seeing(ctx, d.conn, d.from, func(pgx.Tx) (err error) {
			all, err = d.names(ctx, stream)
			return err
		}); err != nil {
			return err
		}
		for _, name := range all {
			names[name] = true
			n, err := d.eraseParked(ctx, name, stream, erase, is)
			found.Events += n
			if err != nil {
				return err
			}
			if n > 0 {
				hit()
			}
		}
	}
	return nil
}

// parkedSchema is a schema with a table of parked events.
type parkedSchema struct {
	name, owner string
	trusted     bool // a trigger of the owner may run with our rights
}

func parkedSchemas(ctx context.Context, tx pgx.Tx) ([]parkedSchema, error) {
	rows, err := tx.Query(ctx, `SELECT n.nspname::pg_catalog.text, o.rolname::pg_catalog.text,
			o.rolsuper OR o.oid OPERATOR(pg_catalog.=) me.oid OR o.oid OPERATOR(pg_catalog.=) d.datdba
			OR NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, o.oid, 'MEMBER')
		FROM pg_catalog.pg_class c
			JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
			JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) c.relowner
			JOIN pg_catalog.pg_roles me ON me.rolname OPERATOR(pg_catalog.=) current_user
			JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
		WHERE c.relname OPERATOR(pg_catalog.=) 'outflow_parked'
			AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,p}')
			AND c.relpersistence OPERATOR(pg_catalog.<>) 't' ORDER BY 1`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s parkedSchema, err error) {
		err = row.Scan(&s.name, &s.owner, &s.trusted)
		return s, err
	})
}

// eraseParked deletes parked events of a consumer. Marks are locked as a handler locks them, so nothing is
// parked or released meanwhile.
func (d *database) eraseParked(ctx context.Context, name, stream string, erase bool,
	is func(*erasure.Parked) bool) (n int64, err error) {
	var ords []int64
	err = seeing(ctx, d.conn, d.from, func(tx pgx.Tx) (err error) {
		ords, err = d.parkedOf(ctx, tx, name, stream, is)
		return err
	})
	if err != nil || len(ords) == 0 || !erase {
		return int64(len(ords)), err
	}
	err = d.change(ctx, name, func(tx pgx.Tx) error {
		if err := seeAll(ctx, tx, d.from); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `SELECT FROM `+d.table("outflow_mark")+` WHERE name = $1 FOR UPDATE`, name)
		if err != nil {
			return d.failed("lock the marks of consumer "+name, err)
		}
		if ords, err = d.parkedOf(ctx, tx, name, stream, is); err != nil {
			return err
		}
		var heads []string // documents whose first event goes
		err = tx.QueryRow(ctx, `WITH gone AS (DELETE FROM `+d.table("outflow_parked")+`
				WHERE name = $1 AND ord = ANY ($2) RETURNING ord, document)
			SELECT pg_catalog.count(*), coalesce(pg_catalog.array_agg(document) FILTER (WHERE ord = (SELECT p.ord
				FROM `+d.table("outflow_parked")+` p WHERE p.name = $1 AND p.document = gone.document
				ORDER BY p.source DESC, p.ord LIMIT 1)), '{}') FROM gone`, name, ords).Scan(&n, &heads)
		if err == nil {
			_, err = tx.Exec(ctx, `UPDATE `+d.table("outflow_parked")+` t SET release = 'retry'
				FROM pg_catalog.unnest($2::text[]) AS head (document) WHERE t.name = $1 AND t.release = ''
				AND t.ord = (SELECT p.ord FROM `+d.table("outflow_parked")+` p WHERE p.name = $1
					AND p.document = head.document ORDER BY p.source DESC, p.ord LIMIT 1)`, name, heads)
		}
		kept := false // by a trigger, and nothing has failed
		if err == nil {
			err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+d.table("outflow_parked")+`
				WHERE name = $1 AND ord = ANY ($2))`, name, ords).Scan(&kept)
		}
		switch {
		case err != nil:
			return d.failed("erase what consumer "+name+" has parked", err)
		case kept:
			return postgres.Fatal(nil, "erase_kept", "", "%s: events of the document stay in %s when they "+
				"are deleted: a trigger keeps them", d.from, d.table("outflow_parked"))
		}
		return nil
	})
	return n, err
}

// parkedOf are the parked events that is names.
func (d *database) parkedOf(ctx context.Context, q consumer.DB, name, stream string,
	is func(*erasure.Parked) bool) (ords []int64, err error) {
	rows, err := q.Query(ctx, `SELECT p.ord, CASE WHEN p.source = $3 THEN p.seq ELSE 0 END, p.subject,
			p.headers, CASE WHEN pg_catalog.jsonb_exists(p.headers, $2) THEN p.data END, c.stream_created
		FROM `+d.table("outflow_parked")+` p JOIN `+d.table("outflow_consumer")+` c ON c.name = p.name
		WHERE p.name = $1`, name, sink.HeaderDeadLetter, live)
	if err == nil {
		var ord, seq int64
		var headers []byte
		var created *time.Time
		e := &erasure.Parked{Stream: stream}
		columns := []any{&ord, &seq, &e.Subject, &headers, &e.Data, &created}
		_, err = pgx.ForEachRow(rows, columns, func() error {
			if e.Sequence = uint64(seq); created != nil {
				e.Created = *created
			}
			var err error
			if e.Header, err = parkedHeader(headers); err != nil {
				return fmt.Errorf("sequence %d: %w", seq, err)
			}
			if is(e) {
				ords = append(ords, ord)
			}
			return nil
		})
	}
	if err != nil {
		return nil, d.failed("read what consumer "+name+" has parked", err)
	}
	return ords, nil
}

// parkedHeader reads the headers of a parked event: lists of texts, or of {"base64": "..."}.
func parkedHeader(text []byte) (nats.Header, error) {
	var all map[string][]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("headers: %w", err)
	}
	h := nats.Header{}
	for name, values := range all {
		for _, v := range values {
			var plain string
			var coded struct{ Base64 string }
			err := json.Unmarshal(v, &plain)
			if err != nil && json.Unmarshal(v, &coded) == nil {
				var b []byte
				b, err = base64.StdEncoding.DecodeString(coded.Base64)
				plain = string(b)
			}
			if err != nil {
				return nil, fmt.Errorf("header %s is neither a text nor base64: %w", name, err)
			}
			h[name] = append(h[name], plain)
		}
	}
	return h, nil
}
