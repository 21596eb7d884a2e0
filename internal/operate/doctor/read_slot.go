package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Slot is a row of pg_replication_slots. What a version does not have is zero.
type Slot struct {
	Name         string `json:"slot_name"`
	Plugin       string `json:"plugin"`
	Database     string `json:"database"`
	Temporary    bool   `json:"temporary"`
	Active       bool   `json:"active"`
	PID          int    `json:"active_pid"`
	Holder       string `json:"holder"` // application_name of the process
	WALStatus    string `json:"wal_status"`
	Safe         *int64 `json:"safe_wal_size"`
	XminAge      int64  `json:"xmin_age"`
	Retained     int64  `json:"retained"`
	Behind       int64  `json:"behind"` // from restart to confirmed
	Failover     bool   `json:"failover"`
	Synced       bool   `json:"synced"`
	Invalidation string `json:"invalidation_reason"`
}

func (r *pgReader) readSlots(ctx context.Context) {
	r.from(ctx, srcSlots, func(ctx context.Context) (err error) {
		if r.f.Slots, err = readSlots(ctx, r.conn, r.f.Config.Slot); err != nil {
			return err
		}
		return pgx.BeginTxFunc(ctx, r.conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			if err := limit(ctx, tx); err != nil {
				return err
			}
			r.f.Readings.Slot, err = catalog.ReadSlot(ctx, tx, r.f.Config.Slot)
			if err == nil {
				r.f.Waiting, err = watch.ReadWaiting(ctx, tx, r.f.Config.Slot)
			}
			return err
		})
	})
}

// readSlots reads all slots: ours first, then those that nobody reads.
func readSlots(ctx context.Context, conn *pgx.Conn, ours string) (all []Slot, err error) {
	const end = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
	return all, query(ctx, conn, &all, fmt.Sprintf(`SELECT coalesce(jsonb_agg(x.slot), '[]')::text FROM (
		SELECT to_jsonb(s) || jsonb_build_object('xmin_age', coalesce(age(s.catalog_xmin), 0),
			'retained', coalesce(greatest(%s - s.restart_lsn, 0), 0),
			'behind', coalesce(greatest(s.confirmed_flush_lsn - s.restart_lsn, 0), 0),
			'holder', coalesce(a.application_name, '')) AS slot
		FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
		ORDER BY s.slot_name <> $1, s.active, s.slot_name LIMIT %d) x`, end, most), ours)
}
