package watch

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// Of the slots that others read, those of Outflows are not shown: by what a process calls itself, and not by
// how that begins, since a subscription may be called outflow_from_1.
func TestTheSlotsOfOthersAreShown(t *testing.T) {
	t.Parallel()
	url := pgtest.Database(t, pgtest.Server(t))
	conn, err := pgx.Connect(outboxdb.Within(t), url)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, conn.Close(context.Background())) })
	var own string
	must.Succeed(t, conn.QueryRow(outboxdb.Within(t), "SELECT current_database()").Scan(&own))
	for slot, holder := range map[string]string{"_own": "", "_idle": "", "_other": "outflow/other/host",
		"_to_2": "outflow_from_1"} {
		_, err := conn.Exec(outboxdb.Within(t), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')",
			own+slot)
		must.Succeed(t, err)
		if holder == "" {
			continue
		}
		reader, err := pgconn.Connect(outboxdb.Within(t),
			url+"&replication=database&application_name="+holder)
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, reader.Conn().Close()) })
		reader.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + own + slot +
			" LOGICAL 0/0 (proto_version '1', publication_names 'none')"})
		must.Succeed(t, reader.Frontend().Flush())
		_, err = reader.ReceiveMessage(outboxdb.Within(t))
		must.Succeed(t, err)
	}
	side := &postgresSide{conn: conn, w: New(Config{Config: config.Config{Slot: own + "_own",
		Cluster: config.Cluster{ID: 1}}})}
	all, err := side.subscribers(outboxdb.Within(t), 0xFFFFFFFF)
	must.Succeed(t, err)
	if len(all) != 2 {
		t.Fatalf("%+v", all)
	}
	for _, s := range all {
		to2 := strings.HasSuffix(s.Slot, "_to_2")
		if !to2 && !strings.HasSuffix(s.Slot, "_idle") || s.Active != to2 || s.Retained == 0 || s.Lost {
			t.Errorf("%+v", s)
		}
	}
}
