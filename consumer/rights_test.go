package consumer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// TestAMissingRightInNATSEndsRun: the server answers a forbidden request with nothing at all. Run ends and
// names the subject, in place of trying again for ever with the lease in its hand; another instance, which
// has the right, has the partitions at once.
func TestAMissingRightInNATSEndsRun(t *testing.T) {
	t.Parallel()
	for _, denied := range []string{
		"$JS.API.STREAM.INFO.", "$JS.API.STREAM.MSG.GET.", "$JS.API.CONSUMER.CREATE.",
		"$JS.API.CONSUMER.MSG.NEXT.", "_INBOX.", "mine.",
	} {
		t.Run(denied, func(t *testing.T) {
			t.Parallel()
			w, s := newHarness(t), &publisher{}
			ns := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
				deny := &server.SubjectPermission{Deny: []string{denied + ">"}}
				rights := &server.Permissions{Publish: deny, Subscribe: deny}
				o.Users = []*server.User{{Username: "all", Password: "pass"},
					{Username: "some", Password: "pass", Permissions: rights}}
			}})
			connect := func(user string) jetstream.JetStream {
				t.Helper()
				options := []nats.Option{nats.UserInfo(user, "pass"), nats.MaxReconnects(-1),
					nats.Timeout(time.Minute)}
				if denied == "mine." {
					options = append(options, nats.CustomInboxPrefix("mine"))
				}
				nc, err := nats.Connect(ns.URL(), options...)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(nc.Close)
				js, err := jetstream.New(nc)
				if err != nil {
					t.Fatal(err)
				}
				return js
			}
			all := connect("all")
			if _, err := all.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX",
				Subjects: []string{"outbox.>"}}); err != nil {
				t.Fatal(err)
			}
			events := s.events(20, 3)
			publish(t, all, events[:10]...)
			long := func(c *Config) { c.Lease = time.Minute }
			healthy := w.start(w.onStream(all, long), handler)
			w.await(events[:10])
			healthy.stopped()

			err := w.start(w.onStream(connect("some"), long), handler).ends()
			if !errors.Is(err, ErrSetup) || !strings.Contains(fmt.Sprint(outbox.FaultOf(err).Err), denied) {
				t.Errorf("Run ends with %v, want ErrSetup that names %s", err, denied)
			}
			publish(t, all, events[10:]...)
			w.start(w.onStream(all, long), handler)
			w.await(events)
		})
	}
}
