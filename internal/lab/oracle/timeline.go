package oracle

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Timelines asks a server for its timeline history and returns on which timeline an LSN lies: at or below a
// switch point, on the old one. The role must be allowed to replicate.
func Timelines(ctx context.Context, url string) (func(LSN) uint32, error) {
	cfg, err := pgconn.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // nothing was written
	ask := func(sql string, column int) (string, error) {
		results, err := conn.Exec(ctx, sql).ReadAll()
		if err != nil {
			return "", fmt.Errorf("%s: %w", sql, err)
		}
		if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) <= column {
			return "", fmt.Errorf("%s: want one row", sql)
		}
		return string(results[0].Rows[0][column]), nil
	}
	text, err := ask("IDENTIFY_SYSTEM", 1)
	if err != nil {
		return nil, err
	}
	present, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("IDENTIFY_SYSTEM: timeline %q", text)
	}
	history := ""
	if present > 1 {
		if history, err = ask(fmt.Sprint("TIMELINE_HISTORY ", present), 1); err != nil {
			return nil, err
		}
	}
	return timelines(uint32(present), history)
}

// timelines reads a history file: "id LSN reason" for each older timeline, oldest first; # begins a comment.
func timelines(present uint32, history string) (func(LSN) uint32, error) {
	type end struct {
		timeline uint32
		at       LSN
	}
	var ends []end
	for line := range strings.Lines(history) {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		id, err := strconv.ParseUint(words[0], 10, 32)
		if err != nil || len(words) < 2 {
			return nil, fmt.Errorf("timeline history: %q", line)
		}
		at, err := ParseLSN(words[1])
		if err != nil {
			return nil, fmt.Errorf("timeline history: %w", err)
		}
		ends = append(ends, end{uint32(id), at})
	}
	return func(l LSN) uint32 {
		for _, e := range ends {
			if l <= e.at {
				return e.timeline
			}
		}
		return present
	}, nil
}
