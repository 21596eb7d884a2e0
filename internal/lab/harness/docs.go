package harness

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

const AccountPassword = "documented"

// AccountsConfig is docs/samples/nats-accounts.conf.
func AccountsConfig(t *testing.T) *server.Options {
	t.Helper()
	conf, err := os.ReadFile(Path("docs", "samples", "nats-accounts.conf"))
	Must(t, err)
	text := string(conf)
	for _, variable := range regexp.MustCompile(`\$[A-Z_]+PASSWORD`).FindAllString(text, -1) {
		text = variable[1:] + " = " + AccountPassword + "\n" + text
	}
	sample, err := server.ProcessConfigFile(WriteFile(t, "nats.conf", text))
	Must(t, err)
	return sample
}

func LogIn(t *testing.T, s *natsserver.Server, user, password string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(s.URL(), nats.UserInfo(user, password), nats.Timeout(AskTimeout),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	Must(t, err)
	t.Cleanup(nc.Close)
	prefix := "$JS.API"
	if user == "search" {
		prefix = "OUTFLOW"
	}
	js, err := jetstream.NewWithAPIPrefix(nc, prefix, jetstream.WithDefaultTimeout(AskTimeout))
	Must(t, err)
	return nc, js
}

// DocumentedBlock is the n-th indented block of a section of a document: what the tests run is what is
// written down.
func DocumentedBlock(t *testing.T, doc, section string, n int) string {
	t.Helper()
	content, err := os.ReadFile(Path("docs", doc))
	Must(t, err)
	_, rest, ok := strings.Cut(string(content), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("docs/%s has no section %q", doc, section)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	var blocks []string
	inside := false
	for line := range strings.Lines(rest) {
		code, indented := strings.CutPrefix(line, "    ")
		if indented && !inside {
			blocks = append(blocks, "")
		}
		if inside = indented; indented {
			blocks[len(blocks)-1] += code
		}
	}
	if n >= len(blocks) {
		t.Fatalf("docs/%s, section %q, has %d blocks", doc, section, len(blocks))
	}
	return blocks[n]
}
