package tablesnapshot

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TableLock is a lock on the outbox, held by a connection of its own.
type TableLock struct {
	reader *Reader
	table  catalog.Table
}

// Table is the outbox as it is, and stays, under the lock.
func (l *TableLock) Table() catalog.Table { return l.table }

// Close ends the lock.
func (l *TableLock) Close() { l.reader.Close() }

// LockTable takes a lock on the outbox that keeps it from being truncated, rewritten or altered, and allows
// everything else. A snapshot does not see rows that ALTER TABLE rewrote after it was exported, so take the
// lock before that.
func LockTable(ctx context.Context, cfg catalog.Config) (*TableLock, error) {
	r, err := OpenReader(ctx, cfg)
	if err != nil {
		return nil, err
	}
	l := &TableLock{reader: r}
	t, err := catalog.ReadTable(ctx, r.conn, cfg.Table)
	if err == nil {
		_, err = r.conn.Exec(ctx, "SET lock_timeout = '30s'")
	}
	if err == nil {
		_, err = r.conn.Exec(ctx, "BEGIN READ ONLY")
	}
	if err == nil {
		_, err = r.conn.Exec(ctx, "LOCK TABLE "+t.Quoted()+" IN ACCESS SHARE MODE")
	}
	switch postgres.SQLState(err) {
	case postgres.StateInsufficientPrivilege:
		l.Close()
		return nil, postgres.Fatal(err, "no_right",
			fmt.Sprintf("GRANT SELECT ON %s to it, for as long as the command runs", t.Quoted()),
			"the role may not read table %s.%s", t.Schema, t.Name)
	case postgres.StateLockNotAvailable:
		err = fmt.Errorf("table %s.%s is locked by somebody who changes it: %w", t.Schema, t.Name, err)
	}
	if err == nil {
		l.table, err = catalog.ReadTable(ctx, r.conn, cfg.Table)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("lock the table: %w", err)
	}
	return l, nil
}
