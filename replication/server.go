package replication

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pglogrepl"

	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Server reads what the server says of itself.
//
// System identifier and timeline history come over the replication connection, which can't answer any more
// once it streams. From then on they are kept, and the timeline is asked for over the ordinary connection: if
// the server has left the one that is kept (a standby was promoted under the stream, or follows another
// primary), that is an error, and a new session learns the new history.
func (s *Session) Server(ctx context.Context) (relay.ServerState, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return relay.ServerState{}, err
	}
	defer unlock()
	if s.streaming() == nil {
		if err := s.identify(ctx); err != nil {
			return relay.ServerState{}, err
		}
	}
	id := s.identity
	state := relay.ServerState{
		SystemID: id.systemID, Database: id.database, Version: s.version, History: id.history,
		WALSenderTimeout: s.serverTimeout,
	}
	var end string
	var segment *string
	err = s.conn.QueryRow(ctx, `SELECT r.recovery,
			CASE WHEN r.recovery THEN coalesce(pg_last_wal_replay_lsn(), '0/0') ELSE pg_current_wal_lsn()
			END::text,
			CASE WHEN r.recovery THEN NULL ELSE pg_walfile_name(pg_current_wal_insert_lsn()) END
		FROM (SELECT pg_is_in_recovery() AS recovery) r`).Scan(&state.InRecovery, &end, &segment)
	if err != nil {
		return relay.ServerState{}, fmt.Errorf("read the end of WAL: %w", err)
	}
	if state.WALEnd, err = outbox.ParseLSN(end); err != nil {
		return relay.ServerState{}, fmt.Errorf("read the end of WAL: %w", err)
	}
	s.walEnd.Store(uint64(state.WALEnd))
	if s.streaming() != nil {
		if err := s.checkTimeline(ctx, segment); err != nil {
			return relay.ServerState{}, err
		}
	}
	return state, nil
}

// checkTimeline reports whether the server is still on the timeline whose history is kept. segment is the
// name of the present WAL segment, which begins with the timeline. A session that began on a standby asks as
// a replication connection does: no SQL says which timeline is replayed.
func (s *Session) checkTimeline(ctx context.Context, segment *string) error {
	kept := s.identity.history.Timeline
	var now uint64
	var err error
	switch {
	case s.recovering:
		sys, err := pglogrepl.IdentifySystem(ctx, s.conn.PgConn())
		if err != nil {
			return fmt.Errorf("read the timeline: %w", err)
		}
		now = uint64(max(sys.Timeline, 0))
	case segment == nil || len(*segment) < 8:
		err = errors.New("no WAL segment")
	default:
		now, err = strconv.ParseUint((*segment)[:8], 16, 32)
	}
	if err != nil {
		return fmt.Errorf("read the timeline: %w", err)
	}
	if now != uint64(kept) {
		return fmt.Errorf("the server went from timeline %d to %d during the session", kept, now)
	}
	return nil
}

// sameTimeline is checkTimeline for what a stream has read. A walsender goes on across a switch of the
// timeline without a word, and a message that names the wrong one looks as if its event were lost with it.
func (s *Session) sameTimeline(st *stream) error {
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	go func() {
		defer crash.Guard()
		select {
		case <-st.quit:
			cancel()
		case <-ctx.Done():
		}
	}()
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return s.checkTimeline(ctx, nil)
}

// identify reads what only the replication connection tells.
func (s *Session) identify(ctx context.Context) error {
	sys, err := pglogrepl.IdentifySystem(ctx, s.repl)
	if err != nil {
		return fmt.Errorf("identify the system: %w", err)
	}
	if sys.Timeline < 1 {
		return fmt.Errorf("identify the system: timeline %d", sys.Timeline)
	}
	id := identity{systemID: sys.SystemID, database: sys.DBName,
		history: relay.History{Timeline: uint32(sys.Timeline)}}
	if id.history.Timeline == s.identity.history.Timeline {
		id.history = s.identity.history // a timeline's history never changes
	} else if sys.Timeline > 1 {
		file, err := pglogrepl.TimelineHistory(ctx, s.repl, sys.Timeline)
		if postgres.SQLState(err) == postgres.StateUndefinedFile {
			return postgres.Fatal(err, "timeline_history",
				"Put the file back into pg_wal, from the archive or from another server of the cluster",
				"the server is on timeline %d and has no history file of it (%08X.history)", sys.Timeline,
				sys.Timeline)
		}
		if err != nil {
			return fmt.Errorf("read the history of timeline %d: %w", sys.Timeline, err)
		}
		if id.history.Switches, err = parseHistory(file.Content); err != nil {
			return fmt.Errorf("read the history of timeline %d: %w", sys.Timeline, err)
		}
	}
	s.identity = id
	return nil
}

// parseHistory reads a timeline history file: a line for each earlier timeline with its number, the LSN where
// it was left and a reason, ascending; empty lines and those that begin with # say nothing.
func parseHistory(content []byte) ([]relay.Switch, error) {
	var all []relay.Switch
	lines := bufio.NewScanner(bytes.NewReader(content))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) < 2 {
			return nil, fmt.Errorf("line %q: want a timeline and an LSN", lines.Text())
		}
		tl, err := strconv.ParseUint(f[0], 10, 32)
		if err != nil || tl == 0 {
			return nil, fmt.Errorf("line %q: want a timeline first", lines.Text())
		}
		end, err := outbox.ParseLSN(f[1])
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		if n := len(all); n > 0 && (uint64(all[n-1].Timeline) >= tl || all[n-1].End > end) {
			return nil, fmt.Errorf("line %q: not in ascending order", lines.Text())
		}
		all = append(all, relay.Switch{Timeline: uint32(tl), End: end})
	}
	return all, lines.Err()
}
