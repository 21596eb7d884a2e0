package support

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lab/tier"
)

func written(t *testing.T, name, text string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestSecretsAreFoundInAllForms: each text holds zqsecret where a secret or a row is, in a form that
// something writes.
func TestSecretsAreFoundInAllForms(t *testing.T) {
	t.Parallel()
	var cfg config.Config
	cfg.NATS.URL = "me:zqsecret1@one:4222, zqsecret2@two:4222"
	r := newRedactor(cfg, []string{"API_KEY=zqsecret3", `MY_PASSWORD=q'u"o&t/e<zqsecret4`,
		"OTEL_EXPORTER_OTLP_HEADERS=x=zqsecret5,y=Basic%20zqsecret6", "A_SECRET=-zqsecret7\n-zqsecret8",
		"PGSERVICEFILE=" + written(t, "service", "[app]\nhost=db\npassword=zqsecret9\n")})
	for _, text := range []string{
		"it said zqsecret1", "it said zqsecret2", "it said zqsecret3", "it said zqsecret5",
		"it said zqsecret6", "it said zqsecret9", "  -zqsecret7\n  -zqsecret8",
		`as SQL 'q''u"o&t/e<zqsecret4'`, `for libpq 'q\'u"o&t/e<zqsecret4'`,
		"q%27u%22o%26t%2fe%3czqsecret4",
		"HTML q&#39;u&#34;o&amp;t/e&lt;zqsecret4", `JSON "q'u\"o&t\/e<zqsecret4"`,
		"api-key: zqsecret", "private-key=zqsecret", "Authorization: Token zqsecret",
		`"Authorization":["Basic zqsecret="]`,
		"zqsecret+/a\nzqsecretb=\n-----END PRIVATE KEY-----",
		"Failing row contains (1, f(x), zqsecret).", "Key (doc_id)=(a)zqsecret) already exists.",
	} {
		if got := r.clean(text+"\nthe next line", true); strings.Contains(got, "zqsecret") ||
			!strings.HasSuffix(got, "\nthe next line") {
			t.Errorf("%s\nbecomes\n%s", text, got)
		}
	}
	const row = `{"why": "Failing row contains (a(b)).", "n": 1}`
	if got := r.clean(row, true); got != `{"why": "Failing row contains (***).", "n": 1}` {
		t.Error(got)
	}
}

// TestNoSecretIsLeftWhateverItIs: secrets of any characters, at each place that settings and environment have
// for one, in texts that write them in each of the ways that programs do. What is left must not tell half of
// one.
func TestNoSecretIsLeftWhateverItIs(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	// no white space and no comma, which divide lists; in a URL they are escaped
	alphabets := [][]rune{
		[]rune("abcdefghijklmnopqrstuvwxyz0123456789"), []rune(`aB3'"\/<>&%+=:;@#?!$*()[]{}|~^-_.`),
		[]rune("äöüß日本語éñ-x1"),
	}
	secret := func() string {
		alphabet := alphabets[rnd.IntN(len(alphabets))]
		s := make([]rune, 8+rnd.IntN(24))
		for i := range s {
			s[i] = alphabet[rnd.IntN(len(alphabet))]
		}
		return "s" + string(s) + "t"
	}
	asJSON := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	libpq := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	for range tier.Size(2_000) {
		s := secret()
		userinfo := url.UserPassword("app", s).String()
		var cfg config.Config
		var environ []string
		where := rnd.IntN(9)
		switch where {
		case 0:
			cfg.Postgres.URL = "postgres://" + userinfo + "@db:5432/app"
		case 1:
			cfg.Postgres.URL = "host=db user=app password='" + libpq.Replace(s) + "'"
		case 2:
			cfg.Postgres.WriteURL = "postgres://app@db/app?password=" + url.QueryEscape(s)
		case 3:
			cfg.NATS.URL = "nats://" + userinfo + "@one:4222,nats://two:4222"
		case 4:
			cfg.NATS.Token = s
		case 5:
			environ = []string{"BILLING_API_TOKEN=" + s}
		case 6:
			environ = []string{"OTEL_EXPORTER_OTLP_HEADERS=x-team=" + url.PathEscape(s)}
		case 7:
			cfg.NATS.PasswordFile = written(t, "password", s+"\n")
		case 8:
			cfg.NATS.Context = written(t, "c.json", asJSON(map[string]string{"user": "app", "password": s}))
		}
		r := newRedactor(cfg, environ)
		for _, form := range []string{
			s, url.QueryEscape(s), url.PathEscape(s), userinfo, fmt.Sprintf("%q", s), asJSON(s),
			asJSON(map[string]string{"message": "refused: " + asJSON(map[string]string{"why": s})}),
			"'" + strings.ReplaceAll(s, "'", "''") + "'", "'" + libpq.Replace(s) + "'", html.EscapeString(s),
			"postgres://" + userinfo + "@db/app", base64.StdEncoding.EncodeToString([]byte(s)),
		} {
			got := r.clean("level=WARN it said "+form+" and went on", rnd.IntN(2) == 0)
			half := form[len(form)/4 : len(form)*3/4]
			if strings.Contains(got, s) || strings.Contains(got, half) {
				t.Fatalf("secret %q at place %d, written %s, is left in\n%s", s, where, form, got)
			}
		}
	}
}

// TestTheServersOfANATSContextAreMasked: the settings do not name them.
func TestTheServersOfANATSContextAreMasked(t *testing.T) {
	t.Parallel()
	var cfg config.Config
	cfg.NATS.Context = written(t, "prod.json", `{"url": "nats://me:zqsecret@broker.internal:4222"}`)
	r := newRedactor(cfg, nil)
	r.learn(cfg, nil)
	if got := r.mask(r.clean("dial broker.internal: zqsecret", true)); got != "dial host-1: ***" &&
		got != "dial host-2: ***" {
		t.Error(got)
	}
}

// TestALogIsText: what is packed, or has another encoding, hides secrets from us. A line of which only the
// end would be taken along is left out.
func TestALogIsText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"p\x00a\x00s\x00s\x00":                    "",
		"\x00\x00\x00a line\n":                    "a line\n",
		strings.Repeat("x", maxLog+1):             "",
		strings.Repeat("x", maxLog) + "\nthe end": "the end",
	} {
		g := &gathering{o: Options{LogFile: written(t, "log", text)}}
		err := g.readLog()
		got := ""
		if len(g.files) > 0 {
			got = string(g.files[0].text)
		}
		if got != want || (err != nil) != strings.HasPrefix(text, "p") {
			t.Errorf("%.20q is taken along as %.20q, %v", text, got, err)
		}
	}
}

// TestAFileIsCutAfterItIsCleaned: half a secret is not recognised. What is cut ends with a whole line.
func TestAFileIsCutAfterItIsCleaned(t *testing.T) {
	t.Parallel()
	g := &gathering{}
	g.add("x", bytes.Repeat([]byte("x"), maxFile+1), false, nil)
	if n := len(g.files[0].text); n != maxFile+1 {
		t.Errorf("%d bytes are there to be cleaned", n)
	}
	text := append(bytes.Repeat([]byte("x"), maxFile-2), "\ny\nz"...)
	if got, more := cut(text); !more || len(got) != maxFile-1 {
		t.Errorf("%d bytes, %v", len(got), more)
	}
	if got, more := cut(text[:maxFile]); more || len(got) != maxFile {
		t.Errorf("%d bytes, %v", len(got), more)
	}
}

// TestTheConditionsOfARepairAreHidden: they may name documents. The record itself keeps them.
func TestTheConditionsOfARepairAreHidden(t *testing.T) {
	t.Parallel()
	r := &checkpoint.Record{Slot: "outflow", Begun: &checkpoint.Begun{
		Attempts: []checkpoint.Attempt{{Seq: 3}, {Seq: 5, Where: "doc_id = 'zqdoc'"}}}}
	text, err := json.Marshal(withoutConditions(r))
	if err != nil || strings.Contains(string(text), "zqdoc") || !strings.Contains(string(text), `"seq":5`) {
		t.Errorf("%s, %v", text, err)
	}
	if r.Begun.Attempts[1].Where == hidden || withoutConditions(&checkpoint.Record{Slot: "s"}).Slot != "s" {
		t.Errorf("%+v", r.Begun)
	}
}
