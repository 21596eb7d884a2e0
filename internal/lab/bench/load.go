package bench

import (
	"context"
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// fillProcedure writes rows in transactions of a size. Payloads are text that does not compress, so that a
// size is a size; a large one lies out of line then, as a large one does. An event's number is the first
// thing in its payload. Counters are dense, as gap mode wants them.
const fillProcedure = `CREATE OR REPLACE PROCEDURE fill(first int, n int, per_tx int, documents int,
	actors int, bytes int) LANGUAGE plpgsql AS $$
DECLARE
	noise text := (SELECT string_agg(md5(i::text), '') FROM generate_series(1, bytes / 32 + 34) i);
BEGIN
	FOR t IN 0 .. n / per_tx - 1 LOOP
		INSERT INTO outbox (doc_id, actor_id, counter, payload)
			SELECT 'doc' || e % documents, 'actor' || e / documents % actors,
				e / documents / actors + 1, jsonb_build_object('n', e,
			'op', substr(noise, 1 + e % 1024, bytes - 24))
			FROM generate_series(first + t * per_tx, first + (t + 1) * per_tx - 1) e;
		COMMIT;
	END LOOP;
END $$`

// backlog is what was written while nobody read.
type backlog struct {
	rows int
	end  outbox.LSN
	wal  float64 // bytes for each event
}

// fill writes a case's backlog.
func (w *harness) fill(ctx context.Context, c *Case) (backlog, error) {
	begin, err := w.lsn(ctx)
	if err != nil {
		return backlog{}, err
	}
	if err := w.call(ctx, c); err != nil {
		return backlog{}, fmt.Errorf("write a backlog: %w", err)
	}
	b := backlog{rows: c.Rows}
	if b.end, err = w.lsn(ctx); err != nil {
		return backlog{}, err
	}
	b.wal = float64(b.end-begin) / float64(c.Rows)
	there, err := w.rows(ctx)
	if err != nil {
		return backlog{}, err
	}
	if there != c.Rows {
		return backlog{}, fmt.Errorf("the table has %d rows, %d were to be written", there, c.Rows)
	}
	// A commit behind the end, so that all before it is on disk and read to the end.
	if err := w.exec(ctx, "SELECT txid_current()"); err != nil {
		return backlog{}, err
	}
	if w.pg != nil {
		// What was written goes to the files now and not during a run.
		err = w.exec(ctx, "CHECKPOINT")
	}
	return b, err
}

// rows is how many the table has.
func (w *harness) rows(ctx context.Context) (n int, err error) {
	return n, w.query(ctx, []any{&n}, "SELECT count(*) FROM "+outboxName)
}

// call runs the procedure, which takes as long as it takes.
func (w *harness) call(ctx context.Context, c *Case) error {
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // what is there is counted
	_, err = conn.Exec(ctx, "SET synchronous_commit = off")
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, fmt.Sprintf("CALL fill(0, %d, %d, %d, %d, %d)", c.Rows, c.PerTx, c.Documents,
		c.Actors, c.Payload))
	return err
}
