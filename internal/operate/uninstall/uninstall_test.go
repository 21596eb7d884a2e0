package uninstall

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/operate/initialize"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }

// TestEachPartThatInitMakesHasAnInverse: a part that init makes and uninstall does not know can't be added.
func TestEachPartThatInitMakesHasAnInverse(t *testing.T) {
	t.Parallel()
	for _, part := range parts.All() {
		if inverses[part] == nil || !slices.Contains(order, part) {
			t.Errorf("what becomes of the %s?", part)
		}
	}
	if len(order) != len(parts.All()) || len(inverses) != len(order) {
		t.Errorf("%d parts, %d in the order, %d inverses", len(parts.All()), len(order), len(inverses))
	}
}

// TestOfAServerThatIsAwayTheWayOutIsNamed: it may be gone for good.
func TestOfAServerThatIsAwayTheWayOutIsNamed(t *testing.T) {
	t.Parallel()
	const nowhere = "127.0.0.1:1"
	for _, c := range []struct{ nats, code, way string }{
		{"nats://" + nowhere, sink.CodeConnect, "outflow uninstall --gone nats"},
		{natstest.Server(t).URL(), postgres.CodeConnect, "outflow uninstall --gone postgres"},
	} {
		cfg, err := config.Load(config.Args{"postgres.url": "postgres://postgres@" + nowhere + "/outflow",
			"nats.url": c.nats}, nil)
		must.Succeed(t, err)
		_, err = Run(t.Context(), cfg, slog.New(slog.DiscardHandler), Options{})
		if f := outbox.FaultOf(err); f == nil || f.Code != c.code || !strings.Contains(f.Hint, c.way) {
			t.Errorf("%v, want %s and %s", err, c.code, c.way)
		}
	}
}

// TestWhatIsConnectedIsNamed, and what becomes of it: a run that stands by ends, a maintain does not.
func TestWhatIsConnectedIsNamed(t *testing.T) {
	t.Parallel()
	ctx, quiet := outboxdb.Within(t), slog.New(slog.DiscardHandler)
	db := outboxdb.New(t, pgtest.Server(t))
	cfg, err := config.Load(config.Args{"postgres.url": db.URL, "nats.url": natstest.Server(t).URL(),
		"slot": db.Slot, "stream": "OUTBOX"}, nil)
	must.Succeed(t, err)
	must.Succeed(t, initialize.Run(ctx, cfg, quiet, func(string, ...any) {}, nil))
	conn, err := postgres.Target{URL: db.URL, Slot: db.Slot, Command: "maintain"}.Connect(ctx)
	must.Succeed(t, err)
	defer postgres.Close(conn)
	rep, err := Run(ctx, cfg, quiet, Options{Progress: func(string, ...any) {}})
	must.Succeed(t, err)
	notes := strings.Join(rep.Notes, "\n")
	for _, want := range []string{db.Slot + ":maintain", "exit code 4, and outflow maintain goes on"} {
		if !strings.Contains(notes, want) {
			t.Errorf("%q does not say %q", notes, want)
		}
	}
}
