package partition

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// What a fence shows of rows that were never compared with a message rests on one slot: it read the WAL of
// all of them. A slot that is made without reading on from the former one has not read what was written
// between the two. So whoever makes it lets the table of states forget what the former one has shown.

// CheckForget makes sure that Forget may write the table of states, if there is one.
func (m *Manager) CheckForget(ctx context.Context) error {
	known, err := m.readLedger(ctx)
	if err != nil {
		return err
	}
	rights := "SELECT, UPDATE"
	if m.lacksBaseline(known) {
		rights += ", INSERT"
	}
	for _, ledger := range m.ledgers {
		var may bool
		err := m.conn.QueryRow(ctx, "SELECT bool_and(has_table_privilege($1::text, r)) FROM "+
			"string_to_table($2, ', ') r", ledger, rights).Scan(&may)
		if err != nil {
			return m.explain("read table "+ledger, err)
		}
		if !may {
			return postgres.Fatal(nil, "no_right", fmt.Sprintf("Set retain.postgres_url to a URL of role "+
				"%s, which owns the outbox, or GRANT %s ON %s TO this role", m.root.Owner, rights, ledger),
				"the role may not write table %s, which says what the former slot has read", ledger)
		}
	}
	return nil
}

// lacksBaseline reports whether a plain table has fences, but no baseline of this shard. The one that its
// first run sets takes all that lies before it for published, also what is older than the slot.
func (m *Manager) lacksBaseline(known map[string]*Partition) bool {
	if known[m.baselineName()] != nil {
		return false
	}
	for _, p := range known {
		if p.Horizon > 0 {
			return true
		}
	}
	return false
}

// Forget forgets what a former slot has shown, when the new one is there and nothing is read from it yet.
// From then on the rows that there are now are compared with messages, and those without one stay; without an
// id column nothing shows any more that they are published. A partition whose fence the former slot has
// confirmed stays as it is: it has read all of its rows.
//
// No run goes on meanwhile: it would write back what it has read before.
func (m *Manager) Forget(ctx context.Context) error {
	if _, err := m.readLedger(ctx); err != nil || len(m.ledgers) == 0 {
		return err
	}
	if err := m.alone(ctx); err != nil {
		return err
	}
	defer m.end(ctx)
	known, err := m.readLedger(ctx)
	if err != nil {
		return err
	}
	err = m.inTx(ctx, func(tx pgx.Tx) error {
		for _, ledger := range m.ledgers {
			// sealed_at: for seal, which takes partitions without it for those of the stream that there is
			_, err := tx.Exec(ctx, "UPDATE "+ledger+` l SET made = false, stream_created = NULL,
					stream_seq = NULL, sealed_at = coalesce(sealed_at, clock_timestamp())
				WHERE `+catalog.OfRoot+` AND horizon IS NULL
					AND state IN ('ahead', 'attached', 'detaching', 'sealed')`, m.root.OID, m.root.Quoted())
			if err != nil {
				return err
			}
			if m.lacksBaseline(known) { // a fence says of which outbox it is
				_, err = tx.Exec(ctx, "INSERT INTO "+ledger+` SELECT (jsonb_populate_record(l,
						jsonb_build_object('name', $3::text, 'missing', NULL))).* FROM `+ledger+` l
					WHERE `+catalog.OfRoot+` AND horizon IS NOT NULL LIMIT 1`, m.root.OID, m.root.Quoted(),
					m.baselineName())
				if err != nil {
					return err
				}
			}
			// all transactions that begin from now on are read by the new slot
			_, err = tx.Exec(ctx, "UPDATE "+ledger+` l SET oid = $1, state = 'sealed', stream_created = NULL,
					stream_seq = NULL, horizon = pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
					fence = pg_current_wal_insert_lsn(), sealed_at = clock_timestamp(),
					system_id = (SELECT system_identifier::text FROM pg_control_system())
				WHERE `+catalog.OfRoot+` AND name = $3`, m.root.OID, m.root.Quoted(), m.baselineName())
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return m.explain("write table of states", err)
	}
	return nil
}

// unshown counts rows that are older than the baseline, and of which nothing shows that they are
// published, where there is no id column.
func (m *Manager) unshown(ctx context.Context, t *plain, p *Partition) (gone missing, err error) {
	if shown(&m.cfg, t.Facts, &Partition{Fence: p.Fence, Stream: t.base.Stream}) {
		return gone, nil
	}
	err = m.conn.QueryRow(ctx, "SELECT count(*) FROM ONLY "+m.root.Quoted()+" t WHERE "+
		before(t.base)+" AND "+before(p)+" AND "+m.own()).Scan(&gone.count)
	if err != nil {
		return gone, m.explain("read table "+m.root.Quoted(), err)
	}
	return gone, nil
}
