package sink

import (
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// What comes in behind a stranger's message is not judged any more, whatever ends the connection: an
// acknowledgement that counted would take the message that was refused for his among those that are stored.
func TestNothingCountsBehindAStranger(t *testing.T) {
	t.Parallel()
	for range 100 {
		for name, c := range map[string]struct {
			lost bool
			want outbox.Class
		}{"he ends it": {false, outbox.Gap}, "it has ended": {true, outbox.Transient}} {
			conn := &Conn{cfg: config(""), inbox: "_INBOX.x.", incoming: make(chan *nats.Msg, 3),
				lost: make(chan struct{})}
			p := &Publisher{conn: conn, notify: make(chan struct{}, 1)}
			conn.publisher.Store(p)
			conn.incoming <- &nats.Msg{Subject: "_outflow.x.outbox.y"}
			conn.incoming <- &nats.Msg{Subject: "_INBOX.x.2", Data: []byte(`{"stream":"OUTBOX","seq":2}`)}
			conn.incoming <- &nats.Msg{Subject: "_INBOX.x.3", Data: []byte(`{"stream":"OUTBOX","seq":3}`)}
			if c.lost {
				conn.fail(conn.lostFault(nil))
			}
			conn.handleIncoming()
			if p.Acked() != 0 || outbox.ClassOf(conn.Err()) != c.want {
				t.Fatalf("%s: acknowledged %d, %v", name, p.Acked(), conn.Err())
			}
		}
	}
}
