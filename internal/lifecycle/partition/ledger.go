package partition

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// State is how far a partition is on its way.
type State string

// The states, in their order. What is read from the catalogs counts before them.
const (
	Ahead     State = "ahead"     // attached, its range is to come
	Attached  State = "attached"  // its range has begun
	Detaching State = "detaching" // DETACH is about to be run, or was
	Sealed    State = "sealed"    // detached, with a fence
	Durable   State = "durable"   // every slot has confirmed the fence
	Archived  State = "archived"  // and the archive has it
	Verified  State = "verified"  // and its rows are in the stream, or in the archive where there is one
	Dropped   State = "dropped"   //
	Kept      State = "kept"      // somebody else detached it: it is theirs
)

// maxHistory is how many partitions that are gone stay in the table of states.
const maxHistory = 1000

// ledgerColumns are those of the table of states. Of a plain table each row is a fence: its horizon is the
// oldest transaction that was open when it was set.
const ledgerColumns = `
  root text NOT NULL,
  name text NOT NULL,
  oid oid NOT NULL,
  state text NOT NULL,
  made boolean NOT NULL DEFAULT false,
  lower timestamptz,
  upper timestamptz,
  fence pg_lsn,
  horizon bigint,
  system_id text NOT NULL,
  rows bigint,
  hash text,
  verified_rows bigint,
  verified_hash text,
  accepted bigint NOT NULL DEFAULT 0,
  stream_created timestamptz,
  stream_seq bigint,
  inserts bigint,
  quiet_since timestamptz,
  sealed_at timestamptz,
  changed_at timestamptz NOT NULL DEFAULT now(),
  attach_xid bigint,
  detach_xmin bigint,
  PRIMARY KEY (root, name)`

func (m *Manager) ledger() string {
	return pgx.Identifier{m.root.Schema, catalog.PartitionStates}.Sanitize()
}

// makeLedger makes the table of states. It belongs to the outbox's owner, because what it says is believed.
func (m *Manager) makeLedger(ctx context.Context, tx pgx.Tx) error {
	for _, sql := range []string{
		"CREATE TABLE IF NOT EXISTS " + m.ledger() + " (" + ledgerColumns + "\n)",
		// it was made before there were these
		"ALTER TABLE " + m.ledger() + " ADD COLUMN IF NOT EXISTS attach_xid bigint, " +
			"ADD COLUMN IF NOT EXISTS detach_xmin bigint",
		"ALTER TABLE " + m.ledger() + " OWNER TO " + postgres.Quote(m.root.Owner),
		"GRANT SELECT ON " + m.ledger() + " TO PUBLIC", // who repairs has to know what is detached
	} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return m.explain("make table "+m.ledger(), err)
		}
	}
	return nil
}

// readLedger reads the states; nothing where there is no table of them yet.
func (m *Manager) readLedger(ctx context.Context) (map[string]*Partition, error) {
	var owner string
	err := m.conn.QueryRow(ctx, `SELECT pg_get_userbyid(c.relowner), EXISTS (SELECT FROM pg_attribute a
			WHERE a.attrelid = c.oid AND a.attname = 'detach_xmin') FROM pg_class c JOIN pg_namespace n
		ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2`, m.root.Schema,
		catalog.PartitionStates).Scan(&owner, &m.newLedger)
	if errors.Is(err, pgx.ErrNoRows) {
		m.hasLedger = false
		return map[string]*Partition{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the owner of table %s: %w", m.ledger(), err)
	}
	if owner != m.root.Owner {
		return nil, postgres.Fatal(nil, "foreign_owner", "Find out who made it and why, then drop it, or "+
			"give it to "+m.root.Owner+" with ALTER TABLE ... OWNER TO",
			"table %s belongs to role %q, the outbox to %q", m.ledger(), owner, m.root.Owner)
	}
	m.hasLedger = true
	rows, err := m.conn.Query(ctx, `SELECT name, oid, state, made, lower, upper, coalesce(fence::text, ''),
			coalesce(horizon, 0), system_id, coalesce(rows, 0), coalesce(hash, ''), verified_rows,
			coalesce(verified_hash, ''), accepted, stream_created, coalesce(stream_seq, 0), inserts,
			coalesce(quiet_since, now()), sealed_at, changed_at, coalesce((to_jsonb(l)->>'attach_xid')::bigint, 0),
			coalesce((to_jsonb(l)->>'detach_xmin')::bigint, 0)
		FROM `+m.ledger()+` l WHERE root = $1 AND state <> 'dropped'`, m.root.Quoted())
	if err != nil {
		return nil, m.explain("read table "+m.ledger(), err)
	}
	all := map[string]*Partition{}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Partition, error) {
		p := &Partition{Known: true}
		var fence, verifiedHash string
		var verifiedRows *int64
		var seq int64
		var lower, upper, created, sealed *time.Time
		err := row.Scan(&p.Name, &p.OID, &p.State, &p.Made, &lower, &upper, &fence, &p.Horizon, &p.System,
			&p.SealedSum.Rows, &p.SealedSum.Hash, &verifiedRows, &verifiedHash, &p.Accepted,
			&created, &seq, &p.Inserts, &p.QuietSince, &sealed, &p.Changed, &p.AttachXID,
			&p.DetachXmin)
		if err != nil {
			return nil, err
		}
		p.Lower, p.Upper, p.Sealed = moment(lower), moment(upper), moment(sealed)
		p.Stream = Stream{Created: moment(created), LastSeq: uint64(seq)}
		if verifiedRows != nil {
			p.Verified = &Sum{Rows: *verifiedRows, Hash: verifiedHash}
		}
		p.noted = p.Name
		if fence != "" {
			p.Fence, err = outbox.ParseLSN(fence)
		}
		return p, err
	})
	if err != nil {
		return nil, m.explain("read table "+m.ledger(), err)
	}
	for _, p := range found {
		all[p.Name] = p
	}
	return all, nil
}

// moment is a time of the table of states: the zero one for NULL.
func moment(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}
