package replication

import (
	"context"
	"fmt"
)

// TableLock is a lock on the outbox, held by a connection of its own.
type TableLock struct {
	reader *Reader
	table  Table
}

// Table is the outbox as it is, and stays, under the lock.
func (l *TableLock) Table() Table { return l.table }

// Close ends the lock.
func (l *TableLock) Close() { l.reader.Close() }

// LockTable holds the outbox in a lock that keeps it from being emptied, rewritten or altered, and nothing else: rows may be written,
// changed and deleted. A snapshot does not see rows that ALTER TABLE wrote again after it was exported; so the lock comes before that.
// Closing the connection ends it.
func LockTable(ctx context.Context, cfg Config) (*TableLock, error) {
	r, err := OpenReader(ctx, cfg)
	if err != nil {
		return nil, err
	}
	l := &TableLock{reader: r}
	t, err := readTable(ctx, r.conn, cfg.Table)
	if err == nil {
		_, err = r.conn.Exec(ctx, "SET lock_timeout = '30s'")
	}
	if err == nil {
		_, err = r.conn.Exec(ctx, "BEGIN READ ONLY")
	}
	if err == nil {
		_, err = r.conn.Exec(ctx, "LOCK TABLE "+t.quoted()+" IN ACCESS SHARE MODE")
	}
	switch sqlState(err) {
	case codeNoPrivilege:
		l.Close()
		f := fatal("no_right", fmt.Sprintf("GRANT SELECT ON %s to it, for as long as the command runs", t.quoted()),
			"the role may not read table %s.%s", t.Schema, t.Name)
		f.Err = err
		return nil, f
	case codeLockTimeout:
		err = fmt.Errorf("table %s.%s is locked by somebody who changes it: %w", t.Schema, t.Name, err)
	}
	if err == nil {
		l.table, err = readTable(ctx, r.conn, cfg.Table)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("lock the table: %w", err)
	}
	return l, nil
}
