package harness

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Backup is what `nats stream backup` keeps: the stream's configuration and state, and the server's archive
// in chunks.
type Backup struct {
	Config json.RawMessage `json:"config"`
	State  json.RawMessage `json:"state"`
	chunks [][]byte
}

// Stream is the name of the stream that it is of.
func (b *Backup) Stream(t *testing.T) string {
	t.Helper()
	var c jetstream.StreamConfig
	Must(t, json.Unmarshal(b.Config, &c))
	return c.Name
}

// apiAnswer is what all answers of the JetStream API have.
type apiAnswer struct {
	Error *jetstream.APIError `json:"error"`
}

// ask makes a request of the JetStream API.
func ask(t *testing.T, nc *nats.Conn, subject string, request, answer any) {
	t.Helper()
	body, err := json.Marshal(request)
	Must(t, err)
	m, err := nc.Request("$JS.API."+subject, body, Patience)
	Must(t, err)
	var failed apiAnswer
	Must(t, json.Unmarshal(m.Data, &failed))
	if failed.Error != nil {
		t.Fatalf("%s: %v", subject, failed.Error)
	}
	Must(t, json.Unmarshal(m.Data, answer))
}

// TakeBackup takes a backup of a stream, consumers included, while it is written to. The server gives up when
// it is not told for 5 s that a chunk has come: then it is taken again.
func TakeBackup(t *testing.T, nc *nats.Conn, stream string) *Backup {
	t.Helper()
	for try := 1; ; try++ {
		b, whole := takeBackupOnce(t, nc, stream)
		if whole {
			return b
		}
		if try == Tries {
			t.Fatal("the server sends no whole backup")
		}
	}
}

func takeBackupOnce(t *testing.T, nc *nats.Conn, stream string) (b *Backup, whole bool) {
	t.Helper()
	inbox := nats.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	Must(t, err)
	defer sub.Unsubscribe() //nolint:errcheck // the connection is the test's
	b = &Backup{}
	ask(t, nc, "STREAM.SNAPSHOT."+stream, map[string]any{"deliver_subject": inbox}, b)
	for {
		m, err := sub.NextMsg(Patience)
		Must(t, err)
		if len(m.Data) == 0 {
			status := m.Header.Get("Status")
			return b, status == "" || status == "204"
		}
		b.chunks = append(b.chunks, m.Data)
		if m.Reply != "" {
			Must(t, m.Respond(nil)) // the server waits for it, now and then
		}
	}
}

// Restore puts a backup back, as `nats stream restore` does. There must be no stream of the name. The server
// gives up when no chunk comes for seconds, and answers no more: then it is put back from the beginning.
func (b *Backup) Restore(t *testing.T, nc *nats.Conn, stream string) {
	t.Helper()
	for try := 1; !b.restoreOnce(t, nc, stream); try++ {
		if try == Tries {
			t.Fatal("the server takes no backup")
		}
	}
}

func (b *Backup) restoreOnce(t *testing.T, nc *nats.Conn, stream string) (whole bool) {
	t.Helper()
	var begun struct {
		To string `json:"deliver_subject"`
	}
	ask(t, nc, "STREAM.RESTORE."+stream, b, &begun)
	for _, chunk := range append(b.chunks, nil) {
		m, err := nc.Request(begun.To, chunk, AskTimeout)
		if errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrNoResponders) {
			return false
		}
		Must(t, err)
		var failed apiAnswer
		if len(m.Data) > 0 {
			Must(t, json.Unmarshal(m.Data, &failed))
		}
		if failed.Error != nil {
			t.Fatalf("restore stream %s: %v", stream, failed.Error)
		}
	}
	return true
}
