package replication

import (
	"context"
	"fmt"
	"math"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/outbox"
)

// Peek decodes what the slot holds without consuming it and calls f with each message, keepalives excepted, in order. limit is the
// number of changes after which no further transaction is begun, 0 for no limit: the server makes everything up to there before
// it sends the first. A message's Data is valid until f returns. An error of f ends it and is returned.
func Peek(ctx context.Context, cfg Config, limit int, binary bool, f func(Message) error) error {
	conn, err := connect(ctx, "postgres.url", cfg.URL)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	if err := asStored(ctx, conn.PgConn()); err != nil {
		return err
	}
	state, err := readSlot(ctx, conn, cfg.Slot)
	if err != nil {
		return err
	}
	if !state.Exists {
		return fatal("slot_missing", "Run `outflow init`, or set slot to one that exists", "slot %q does not exist", cfg.Slot)
	}
	params := [][]byte{[]byte(cfg.Slot), nil, []byte(publicationNames(cfg.Publication)), strconv.AppendBool(nil, binary)}
	if limit > 0 {
		params[1] = strconv.AppendInt(nil, int64(min(limit, math.MaxInt32)), 10)
	}
	const sql = `SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes($1, NULL, $2,
		'proto_version', '1', 'publication_names', $3, 'messages', 'true', 'binary', $4)`
	// One level below pgx: that would fetch the data as text.
	rows := conn.PgConn().ExecParams(ctx, sql, params, nil, nil, []int16{pgx.TextFormatCode, pgx.BinaryFormatCode})
	for err == nil && rows.NextRow() {
		var lsn outbox.LSN
		if lsn, err = outbox.ParseLSN(string(rows.Values()[0])); err == nil {
			err = f(Message{WALEnd: lsn, Data: rows.Values()[1]})
		}
	}
	if err != nil {
		return err // the connection is closed with the rest of the rows unread
	}
	if _, err = rows.Close(); err != nil {
		return peekFault(cfg, state, err)
	}
	return nil
}

func peekFault(cfg Config, state outbox.SlotState, err error) error {
	var f *outbox.Fault
	switch sqlState(err) {
	case codeObjectInUse:
		holder := fmt.Sprintf("pid %d", state.ActivePID)
		if state.Holder != "" {
			holder += " (" + state.Holder + ")"
		}
		if state.ActivePID == 0 {
			holder = "another connection"
		}
		f = fatal("slot_in_use", "Stop outflow first, or inspect another slot", "slot %q is in use by %s", cfg.Slot, holder)
	case codeUndefinedObject:
		f = publicationMissing(cfg.Publication, cfg.Table != "", nil)
	case codeNoPrivilege:
		f = fatal("no_replication_right", "ALTER ROLE ... REPLICATION (on managed platforms grant their replication role)",
			"the role may not read from a replication slot")
	case codeNotInPrerequisite:
		f = fatal("slot_unusable", "Run `outflow status`: it says what happened to the slot and what to do",
			"slot %q can't be read", cfg.Slot)
	default:
		return fmt.Errorf("peek at slot %s: %w", cfg.Slot, err)
	}
	f.Err = err
	return f
}
