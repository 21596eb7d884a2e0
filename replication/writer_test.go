package replication

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func messages(n int) func(*seen) bool {
	return func(s *seen) bool { return s.kinds['M'] >= n && s.kinds['C'] >= n }
}

func TestWriterComesBackAfterAnError(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	s := d.start(0)
	w := NewWriter(d.config())
	defer w.Close()
	must.Succeed(t, w.Heartbeat(within(t)))
	settings := relay.Settings{Horizon: relay.DefaultHorizon, MaxEvents: 5, MaxBytes: 6}
	must.Succeed(t, w.Change(within(t), settings))
	read(t, s, messages(2))
	d.Exec("SELECT pg_terminate_backend($1)", int32(w.conn.PgConn().PID()))
	if err := w.Heartbeat(within(t)); err == nil {
		t.Fatal("a tick over a connection that was terminated")
	}
	must.Succeed(t, w.Heartbeat(within(t)))
	read(t, s, messages(1))
	server, err := s.Server(within(t))
	must.Succeed(t, err)
	if err := w.Check(within(t), server); err != nil {
		t.Error(err)
	}
	server.Database = "elsewhere"
	wantFault(t, w.Check(within(t), server), outbox.Fatal, "write_url")
	d.Exec("REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC")
	cfg := d.config()
	cfg.WriteURL = cfg.URL + "&role=pg_signal_backend"
	hidden := NewWriter(cfg)
	defer hidden.Close()
	must.Succeed(t, hidden.Check(within(t), server)) // ticks may go there
	w.Close()
	if err := w.Heartbeat(within(t)); err == nil {
		t.Error("a tick after Close")
	}
}

func TestHeartbeatAndSettingsAreWhatTheDecoderReads(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	w := NewWriter(d.config())
	defer w.Close()
	settings := relay.Settings{Horizon: relay.DefaultHorizon, Sort: outbox.ByCommit, MaxEvents: 5,
		MaxBytes: 6}
	must.Succeed(t, w.Heartbeat(within(t)))
	must.Succeed(t, w.Change(within(t), settings))
	var got []string
	err := Peek(within(t), d.config(), 0, func(m Message) error {
		if m.Data[0] == 'M' {
			if m.Data[1] != 1 {
				t.Errorf("%q is not transactional", m.Data)
			}
			got = append(got, string(m.Data[10:]))
		}
		return nil
	})
	if err != nil || len(got) != 2 ||
		!strings.HasPrefix(got[0], relay.HeartbeatPrefix+"\x00\x00\x00\x00\x00") ||
		!strings.HasPrefix(got[1], relay.SettingsPrefix+"\x00") ||
		!strings.HasSuffix(got[1], settings.Content(d.cfg.Slot)) {
		t.Errorf("%q, %v", got, err)
	}
}

// No replica has to have a tick before it is decoded.
func TestHeartbeatDoesNotWaitForASynchronousStandby(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Own(t, 0, "synchronous_standby_names=nobody", "synchronous_commit=local"))
	d.Exec("ALTER DATABASE " + d.Text("SELECT quote_ident(current_database())") +
		" SET synchronous_commit = on")
	w := NewWriter(d.config())
	defer w.Close()
	for range 3 {
		must.Succeed(t, w.Heartbeat(within(t)))
	}
}
