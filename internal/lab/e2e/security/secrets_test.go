package security

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// planted are secrets that must not come out anywhere.
type planted struct {
	t       *testing.T
	secrets map[string]string
}

// newPlanted makes secrets that stand nowhere else, with characters that have to be escaped.
func newPlanted(t *testing.T, names ...string) *planted {
	p := &planted{t: t, secrets: map[string]string{}}
	for i, name := range names {
		p.secrets[name] = fmt.Sprintf("zq%s:/@ %%\"'%d", name, 7000+i)
	}
	return p
}

// search looks for the secrets, as they are and in what URLs, JSON and base64 make of them; the part before
// the first special character alone is enough.
func (p *planted) search(where, text string) {
	p.t.Helper()
	for _, s := range p.secrets {
		start, _, _ := strings.Cut(s, ":")
		for _, form := range []string{s, start, url.QueryEscape(s), url.PathEscape(s),
			base64.StdEncoding.EncodeToString([]byte(s))[:12]} {
			if strings.Contains(text, form) {
				p.t.Errorf("%s shows %q:\n%s", where, form, text)
				return
			}
		}
	}
}

// everything searches all that an installation shows while it runs.
func (p *planted) everything(o *harness.Outflow, ready bool) {
	p.t.Helper()
	commands := [][]string{{"config"}, {"status", "--json"}, {"init"}}
	if ready {
		commands = append(commands, []string{"status"}, []string{"inspect"}, []string{"init", "--print"},
			[]string{"run", "--help"})
	}
	for _, args := range commands {
		out, errOut, _ := o.Run(args...)
		p.search("outflow "+strings.Join(args, " "), out+errOut)
	}
	for _, path := range []string{"/", "/metrics", "/healthz", "/readyz", "/status.json"} {
		_, body := o.Get(path)
		p.search(path, body)
	}
	if cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", o.Process.PID())); err == nil {
		p.search("the process's arguments", string(cmdline))
	}
	p.search("the log", o.Log.String())
}

// TestSecretsAppearInNoOutput plants a secret in each place where one may stand, and looks for them in all
// that comes out: while all is well, while servers refuse them, and where the configuration itself is wrong.
func TestSecretsAppearInNoOutput(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	p := newPlanted(t, "natspw", "natstoken", "pgpw", "wrongpw", "wrongtoken")
	natsPassword, natsToken := p.secrets["natspw"], p.secrets["natstoken"]
	secured := natstest.Server(t,
		natsserver.Options{Tune: func(o *server.Options) { o.Username, o.Password = "app", natsPassword }})
	tokened := natstest.Server(t,
		natsserver.Options{Tune: func(o *server.Options) { o.Authorization = natsToken }})
	inURL := func(secret, host string) string { // the shared server asks nobody for a password
		u, err := url.Parse(pgtest.Database(t, pg))
		harness.Must(t, err)
		u.User = url.UserPassword("postgres", secret)
		if host != "" {
			u.Host = host
		}
		return u.String()
	}
	settings := func(o *harness.Outflow) []string {
		return append([]string{"LOG_LEVEL=debug"}, "LISTEN="+o.Listen)
	}
	run := func(t *testing.T, o *harness.Outflow, ready bool) {
		t.Helper()
		o.Start()
		if ready {
			o.AwaitReady()
		} else {
			harness.Eventually(t, "an error in the log", func() error {
				if log := o.Log.String(); !strings.Contains(log, "err=") &&
					!strings.Contains(log, "outflow: ") {
					return fmt.Errorf("%s", log)
				}
				return nil
			})
		}
		p.everything(o, ready)
		o.Kill()
		p.search("the log", o.Log.String())
	}

	t.Run("all is well", func(t *testing.T) {
		t.Parallel()
		database := inURL(p.secrets["pgpw"], "")
		o := harness.New(t, database, secured.URL(), harness.SlotName("secrets"), "POSTGRES_WRITE_URL="+
			strings.Replace(database, "127.0.0.1", "localhost", 1))
		o.UseStream(strings.ToUpper(o.Slot))
		o.Set(append(settings(o), "NATS_USER=app", "NATS_PASSWORD="+natsPassword)...)
		o.Init()
		run(t, o, true)
	})
	t.Run("a token", func(t *testing.T) {
		t.Parallel()
		o := harness.New(t, inURL(p.secrets["pgpw"], ""),
			at(tokened, "nats", url.User(natsToken), "localhost"), harness.SlotName("secrets"))
		o.UseStream(strings.ToUpper(o.Slot))
		o.Set(settings(o)...)
		o.Init()
		run(t, o, true)
	})
	t.Run("keywords", func(t *testing.T) {
		t.Parallel()
		u, err := url.Parse(pgtest.Database(t, pg))
		harness.Must(t, err)
		secret := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(p.secrets["pgpw"])
		o := harness.New(t, fmt.Sprintf("host=127.0.0.1 port=%s user=postgres dbname=%s sslmode=disable "+
			"password='%s'", u.Port(), u.Path[1:], secret),
			at(secured, "nats", url.UserPassword("app", natsPassword), "127.0.0.1"),
			harness.SlotName("secrets"))
		o.UseStream(strings.ToUpper(o.Slot))
		o.Set(settings(o)...)
		o.Init()
		run(t, o, true)
	})
	for name, natsURL := range map[string]string{
		"nobody there":     "nats://app:" + url.QueryEscape(natsPassword) + "@127.0.0.1:1",
		"no such host":     "nats://" + url.QueryEscape(natsToken) + "@nowhere.invalid:4222",
		"refused password": at(secured, "nats", url.UserPassword("app", p.secrets["wrongpw"]), "localhost"),
		"refused token":    at(tokened, "nats", url.User(p.secrets["wrongtoken"]), "localhost"),
		"several": "nats://app:" + url.QueryEscape(natsPassword) + "@127.0.0.1:1,nats://" +
			url.QueryEscape(natsToken) + "@127.0.0.1:2",
		"second @":     "nats://app:a@" + url.QueryEscape(natsPassword) + "@127.0.0.1:1",
		"not escaped":  "nats://app:" + natsPassword + "@127.0.0.1:1",
		"no port":      "nats://" + natsToken + "@127.0.0.1:many",
		"wrong scheme": "http://app:" + url.QueryEscape(natsPassword) + "@127.0.0.1:1",
	} {
		t.Run("nats "+name, func(t *testing.T) {
			t.Parallel()
			o := harness.New(t, inURL(p.secrets["pgpw"], ""), natsURL, harness.SlotName("secrets"))
			o.Set(settings(o)...)
			run(t, o, false)
		})
	}
	for name, pgURL := range map[string]string{
		"nobody there": inURL(p.secrets["pgpw"], "127.0.0.1:1"),
		"no such host": inURL(p.secrets["pgpw"], "nowhere.invalid:5432"),
		"not escaped":  "postgres://postgres:" + p.secrets["pgpw"] + "@127.0.0.1:1/app",
		"second @":     "postgres://postgres:a@" + url.QueryEscape(p.secrets["pgpw"]) + "@127.0.0.1:1/app",
		"mistyped": "host=127.0.0.1 port=1 user=x pasword='" +
			strings.ReplaceAll(p.secrets["pgpw"], "'", `\'`) + "'",
		"options": "postgres://postgres@127.0.0.1:1/app?options=" +
			url.QueryEscape("-c x.y="+p.secrets["pgpw"]),
		"bad port": "postgres://postgres:" + url.QueryEscape(p.secrets["pgpw"]) + "@127.0.0.1:many/app",
		"bad mode": inURL(p.secrets["pgpw"], "127.0.0.1:1") + "&sslmode=perhaps",
		"in the query": "postgres://postgres@127.0.0.1:1/app?password=" + url.QueryEscape(p.secrets["pgpw"]) +
			"&sslpassword=" + url.QueryEscape(p.secrets["pgpw"]),
		"keywords": "host=127.0.0.1 port=1 user=x password='" +
			strings.ReplaceAll(p.secrets["pgpw"], "'", `\'`) + "' nonsense",
		"no keywords": p.secrets["pgpw"],
	} {
		t.Run("postgres "+name, func(t *testing.T) {
			t.Parallel()
			o := harness.New(t, pgURL, secured.URL(), harness.SlotName("secrets"))
			o.Set(append(settings(o), "NATS_USER=app", "NATS_PASSWORD="+natsPassword)...)
			run(t, o, false)
		})
	}
	t.Run("a configuration that is wrong", func(t *testing.T) {
		t.Parallel()
		secret := p.secrets["natspw"]
		quoted := fmt.Sprintf("%q", secret)
		for name, c := range map[string]struct {
			env, args []string
			content   string
		}{
			"two ways": {env: []string{"NATS_USER=app", "NATS_PASSWORD=" + secret, "NATS_TOKEN=" +
				natsToken}},
			"password alone":      {env: []string{"NATS_PASSWORD=" + secret}},
			"control character":   {env: []string{"NATS_PASSWORD=" + secret + "\x01"}},
			"unknown variable":    {env: []string{"NATS_PASSWROD=" + secret}},
			"unknown flag":        {args: []string{"--nats.passwrod=" + secret}},
			"unknown flag, apart": {args: []string{"--nats.passwrod", secret}},
			"list":                {content: "nats:\n  password: [" + quoted + "]\n"},
			"mapping":             {content: "nats:\n  password: {a: " + quoted + "}\n"},
			"unknown key":         {content: "nats:\n  passwrod: " + quoted + "\n"},
			"twice": {content: "nats:\n  password: " + quoted + "\n  password: " + quoted +
				"\n"},
			"not closed":         {content: "nats:\n  password: \"" + secret + "\n  user: [\n"},
			"wrong indent":       {content: "nats:\n  password: x\n " + quoted + ": [\n"},
			"a tab":              {content: "nats:\n\tpassword: " + quoted + "\n"},
			"anchor":             {content: "nats:\n  password: &a " + quoted + "\n  token: *b\n"},
			"a number":           {content: "postgres:\n  url: 5\nnats:\n  password: " + quoted + "\n"},
			"in the wrong place": {content: "password: " + quoted + "\n"},
		} {
			o := harness.New(t, inURL(secret, ""), secured.URL(), "wrong")
			o.Set(c.env...)
			args := append([]string{"config"}, c.args...)
			if c.content != "" {
				args = append(args, "--config", harness.WriteFile(t, "outflow.yaml", c.content))
			}
			out, errOut, code := o.Run(args...)
			if code != 2 && name != "password alone" {
				t.Errorf("%s: exit code %d\n%s", name, code, errOut)
			}
			p.search(name, out+errOut)
		}
	})
	if _, err := nats.Connect(secured.URL(), nats.UserInfo("app", natsPassword),
		nats.Timeout(harness.AskTimeout)); err != nil {
		t.Fatal(err) // the secrets are what the servers take
	}
}
