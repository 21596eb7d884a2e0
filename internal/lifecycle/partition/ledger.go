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

// ledgerColumns are those of the table of states. The outbox is known by root_oid, and by its name only where
// that is of another database (catalog.OfRoot). Of a plain table each row is a fence: its horizon is the
// oldest transaction that was open when it was set.
const ledgerColumns = `
  root text NOT NULL,
  root_oid oid,
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
  missing uuid[],
  refused bigint NOT NULL DEFAULT 0,
  refused_at timestamptz,
  refused_by text,
  verified_by jsonb,
  streams jsonb,
  PRIMARY KEY (root, name)`

func (m *Manager) ledger() string {
	return pgx.Identifier{m.root.Schema, catalog.PartitionStates}.Sanitize()
}

// makeLedger makes the table of states. It belongs to the outbox's owner, because what it says is believed:
// one that somebody has made since it was looked for is an error.
func (m *Manager) makeLedger(ctx context.Context, tx pgx.Tx) error {
	statements := []string{"ALTER TABLE " + m.ledger() + newColumns}
	if !m.hasLedger {
		statements = []string{
			"CREATE TABLE " + m.ledger() + " (" + ledgerColumns + "\n)",
			"ALTER TABLE " + m.ledger() + " OWNER TO " + postgres.Quote(m.root.Owner),
			"GRANT SELECT ON " + m.ledger() + " TO PUBLIC", // who repairs has to know what is detached
		}
	}
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return m.explain("make table "+m.ledger(), err)
		}
	}
	return nil
}

// newColumns are those that a table of states of an older version lacks.
const newColumns = ` ADD COLUMN IF NOT EXISTS root_oid oid, ADD COLUMN IF NOT EXISTS attach_xid bigint,
	ADD COLUMN IF NOT EXISTS detach_xmin bigint, ADD COLUMN IF NOT EXISTS missing uuid[],
	ADD COLUMN IF NOT EXISTS refused bigint NOT NULL DEFAULT 0,
	ADD COLUMN IF NOT EXISTS refused_at timestamptz, ADD COLUMN IF NOT EXISTS refused_by text,
	ADD COLUMN IF NOT EXISTS verified_by jsonb, ADD COLUMN IF NOT EXISTS streams jsonb`

// takeUp makes the table of states if there is none, or it is one of an older version, and gives all rows of
// the outbox the name that it has now. Those that were left behind in another schema come along.
func (m *Manager) takeUp(ctx context.Context) error {
	if m.hasLedger && !m.oldLedger && len(m.stale) == 0 {
		return nil
	}
	err := m.inTx(ctx, func(tx pgx.Tx) error {
		if !m.hasLedger || m.oldLedger {
			if err := m.makeLedger(ctx, tx); err != nil {
				return err
			}
		}
		// an outbox that had this name before, and has not been seen since
		_, err := tx.Exec(ctx, "UPDATE "+m.ledger()+" l SET root = concat(l.root, ' of OID ', l.root_oid) "+
			"WHERE l.root = $2 AND NOT ("+catalog.OfRoot+")", m.root.OID, m.root.Quoted())
		for _, from := range m.stale {
			if err != nil {
				break
			}
			if _, err = tx.Exec(ctx, "ALTER TABLE "+from+newColumns); err != nil {
				break
			}
			_, err = tx.Exec(ctx, `WITH taken AS (DELETE FROM `+from+` l WHERE `+catalog.OfRoot+`
					RETURNING l.*, `+catalog.Here+` AS here)
				INSERT INTO `+m.ledger()+` (root, root_oid, system_id, `+ledgerRest+`)
				SELECT $2, $1, CASE WHEN here THEN system_id ELSE '' END, `+ledgerRest+` FROM taken
				ON CONFLICT (root, name) DO NOTHING`, m.root.OID, m.root.Quoted())
		}
		return err
	})
	switch state := postgres.SQLState(err); {
	case !m.hasLedger && (state == stateDuplicateTable || state == stateUnique): // it was made meanwhile
		if _, err := m.readLedger(ctx); err != nil { // by another role
			return err
		}
		return m.takeUp(ctx)
	case err != nil:
		return m.explain("write table "+m.ledger(), err)
	}
	_, err = m.readLedger(ctx) // whose is it?
	return err
}

// ledgerRest are the columns of the table of states beside those that say which outbox it is.
const ledgerRest = `name, oid, state, made, lower, upper, fence, horizon, rows, hash, verified_rows,
	verified_hash, accepted, stream_created, stream_seq, inserts, quiet_since, sealed_at, changed_at,
	attach_xid, detach_xmin, missing, refused, refused_at, refused_by, verified_by,
	streams`

// readLedger reads the states; nothing where there is no table of them yet.
func (m *Manager) readLedger(ctx context.Context) (map[string]*Partition, error) {
	var owner string
	err := m.conn.QueryRow(ctx, `SELECT pg_get_userbyid(c.relowner), 9 > (SELECT count(*) FROM pg_attribute a
			WHERE a.attrelid = c.oid AND a.attname IN ('root_oid', 'attach_xid', 'detach_xmin', 'missing',
				'refused', 'refused_at', 'refused_by', 'verified_by', 'streams') AND NOT a.attisdropped)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, m.root.Schema, catalog.PartitionStates).
		Scan(&owner, &m.oldLedger)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read the owner of table %s: %w", m.ledger(), err)
	}
	if m.hasLedger = err == nil; m.hasLedger && owner != m.root.Owner {
		return nil, catalog.ForeignKept(m.ledger(), owner, m.root.Owner)
	}
	kept, err := catalog.Beside(ctx, m.conn, m.root.Table, catalog.PartitionStates)
	if err != nil {
		return nil, err
	}
	all := map[string]*Partition{}
	m.ledgers, m.stale = nil, nil
	for _, k := range kept {
		found, stale, err := m.readStates(ctx, k)
		if err != nil {
			return nil, m.explain("read table "+k.Table, err)
		}
		if k.Own || len(found) > 0 {
			m.ledgers = append(m.ledgers, k.Table)
		}
		if stale {
			m.stale = append(m.stale, k.Table)
		}
		for _, p := range found {
			if all[p.Name] == nil {
				all[p.Name] = p
			}
		}
	}
	return all, nil
}

// readStates reads the outbox's rows of a table of states, and whether one of them has to be taken up, or
// another outbox's are in the way, which had this name before.
func (m *Manager) readStates(ctx context.Context, k catalog.Kept) (found []*Partition, stale bool,
	err error) {
	rows, err := m.conn.Query(ctx, `SELECT name, oid, state, made, lower, upper, coalesce(fence::text, ''),
			coalesce(horizon, 0), CASE WHEN `+catalog.Here+` THEN system_id ELSE '' END, coalesce(rows, 0),
			coalesce(hash, ''), verified_rows,
			coalesce(verified_hash, ''), accepted, stream_created, coalesce(stream_seq, 0), inserts,
			coalesce(quiet_since, now()), sealed_at,
			coalesce((to_jsonb(l)->>'attach_xid')::bigint, 0), coalesce((to_jsonb(l)->>'detach_xmin')::bigint, 0),
			ARRAY(SELECT jsonb_array_elements_text(nullif(to_jsonb(l)->'missing', 'null'))),
			coalesce((to_jsonb(l)->>'refused')::bigint, 0), (to_jsonb(l)->>'refused_at')::timestamptz,
			coalesce(to_jsonb(l)->>'refused_by', ''), nullif(to_jsonb(l)->'verified_by', 'null'),
			nullif(to_jsonb(l)->'streams', 'null'),
			root <> $2 OR (to_jsonb(l)->>'root_oid')::oid IS DISTINCT FROM $1, `+catalog.OfRoot+`
		FROM `+k.Table+` l WHERE (`+catalog.OfRoot+` OR $3 AND l.root = $2) AND state <> 'dropped'`,
		m.root.OID, m.root.Quoted(), k.Own)
	if err != nil {
		return nil, false, err
	}
	stale = !k.Own
	others := false
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Partition, error) {
		p := &Partition{Known: true}
		var old, ours bool
		var fence, verifiedHash string
		var verifiedRows *int64
		var seq int64
		var lower, upper, created, sealed, refused *time.Time
		err := row.Scan(&p.Name, &p.OID, &p.State, &p.Made, &lower, &upper, &fence, &p.Horizon, &p.System,
			&p.SealedSum.Rows, &p.SealedSum.Hash, &verifiedRows, &verifiedHash, &p.Accepted,
			&created, &seq, &p.Inserts, &p.QuietSince, &sealed, &p.AttachXID,
			&p.DetachXmin, &p.Missing, &p.Refused, &refused, &p.RefusedBy, &p.VerifiedBy, &p.Streams,
			&old, &ours)
		if others = others || !ours; err != nil || !ours {
			return nil, err
		}
		p.Lower, p.Upper, p.Sealed = moment(lower), moment(upper), moment(sealed)
		p.RefusedAt = moment(refused)
		p.Stream = Stream{Created: moment(created), LastSeq: uint64(seq)}
		if verifiedRows != nil {
			p.Verified = &Sum{Rows: *verifiedRows, Hash: verifiedHash}
		}
		p.noted = p.Name
		stale = stale || old
		if fence != "" {
			p.Fence, err = outbox.ParseLSN(fence)
		}
		return p, err
	})
	for _, p := range all {
		if p != nil {
			found = append(found, p)
		}
	}
	return found, others || stale && len(found) > 0, err
}

// moment is a time of the table of states: the zero one for NULL.
func moment(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}
