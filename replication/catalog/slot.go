package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Querier is what reads from the catalog: an ordinary connection.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// slotRow has the columns of pg_replication_slots that are read; those that a version lacks stay empty.
type slotRow struct {
	Plugin       string      `json:"plugin"`
	Database     string      `json:"database"`
	Active       bool        `json:"active"`
	ActivePID    int         `json:"active_pid"`
	Confirmed    *outbox.LSN `json:"confirmed_flush_lsn"`
	Restart      *outbox.LSN `json:"restart_lsn"`
	WALStatus    string      `json:"wal_status"`
	SafeWALSize  *int64      `json:"safe_wal_size"`
	Conflicting  bool        `json:"conflicting"`         // from PostgreSQL 16
	Invalidation string      `json:"invalidation_reason"` // from PostgreSQL 17
}

// ReadSlot reads the slot's row in pg_replication_slots. A slot that does not exist is the zero value and no
// error.
func ReadSlot(ctx context.Context, q Querier, slot string) (relay.SlotState, error) {
	var row []byte
	var app, addr string
	err := q.QueryRow(ctx, `SELECT to_jsonb(s)::text, coalesce(a.application_name, ''),
		coalesce(host(a.client_addr), '')
		FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
		WHERE s.slot_name = $1`, slot).Scan(&row, &app, &addr)
	if errors.Is(err, pgx.ErrNoRows) {
		return relay.SlotState{}, nil
	}
	if err != nil {
		return relay.SlotState{}, fmt.Errorf("read slot %s: %w", slot, err)
	}
	var r slotRow
	if err := json.Unmarshal(row, &r); err != nil {
		return relay.SlotState{}, fmt.Errorf("read slot %s: %w", slot, err)
	}
	return r.state(app, addr), nil
}

func (r slotRow) state(app, addr string) relay.SlotState {
	s := relay.SlotState{
		Exists: true, Plugin: r.Plugin, Database: r.Database, Active: r.Active, ActivePID: r.ActivePID,
		WALStatus: r.WALStatus, SafeWALSize: -1,
	}
	if r.Confirmed != nil {
		s.Confirmed = *r.Confirmed
	}
	if r.Restart != nil {
		s.Restart = *r.Restart
	}
	if r.SafeWALSize != nil { // below 0 of a slot that is unreserved
		s.SafeWALSize = max(*r.SafeWALSize, 0)
	}
	if r.ActivePID != 0 {
		s.Holder = strings.TrimSpace(app + " " + addr)
	}
	switch {
	case r.Invalidation != "":
		s.Invalidation = r.Invalidation
	case r.Conflicting:
		s.Invalidation = "conflicting with recovery"
	case r.WALStatus == "lost":
		s.Invalidation = "its WAL was removed"
	}
	return s
}
