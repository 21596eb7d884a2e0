package operate

import (
	"archive/tar"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// unpacked runs outflow support and returns what is in the archive, by name, with what was printed under "".
func unpacked(t *testing.T, o *harness.Outflow, args ...string) map[string]string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "report.tar.gz")
	out, errOut, code := o.Run(append([]string{"support", "--output", name}, args...)...)
	if code != 0 {
		t.Fatalf("outflow support: exit code %d: %s%s", code, out, errOut)
	}
	info, err := os.Stat(name)
	harness.Must(t, err)
	if info.Mode() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	f, err := os.Open(name)
	harness.Must(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	harness.Must(t, err)
	all := map[string]string{"": out + errOut}
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		harness.Must(t, err)
		text, err := io.ReadAll(archive)
		harness.Must(t, err)
		all[strings.TrimPrefix(h.Name, "outflow-support/")] = string(text)
	}
	for name, text := range all {
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("%s is no JSON:\n%s", name, text)
		}
		if name != "" && name != "manifest.json" && !strings.Contains(out, name+"\n") {
			t.Errorf("%s is not listed:\n%s", name, out)
		}
	}
	if rest, _ := filepath.Glob(filepath.Join(filepath.Dir(name), ".*")); len(rest) > 0 {
		t.Errorf("left behind: %v", rest)
	}
	return all
}

// mustNotHold looks for texts in a whole archive, also in the forms that URLs, JSON and base64 have.
func mustNotHold(t *testing.T, archive map[string]string, secrets ...string) {
	t.Helper()
	for _, s := range secrets {
		start, _, _ := strings.Cut(s, ":") // of one with special characters
		for _, form := range []string{s, start, url.QueryEscape(s), url.PathEscape(s),
			base64.StdEncoding.EncodeToString([]byte(s))} {
			for name, text := range archive {
				if i := strings.Index(text, form); i >= 0 {
					t.Errorf("%q holds %q: …%s…", name, form, text[max(0, i-80):min(len(text), i+80)])
				}
			}
		}
	}
}

// secretOf is a password that stands nowhere else, with characters that have to be escaped.
func secretOf(what string) string { return "zq" + what + `:/@ %"'71` }

const seed = "SUAEL6GG2L2HIF7DUGZJGMRUFKXELGGYFMHF76UO2AYBG3K4YLWR3FKC2Q"

// TestSupportHoldsNoSecrets plants a secret in each place where one may stand, and looks for them in all that
// is in the archive.
func TestSupportHoldsNoSecrets(t *testing.T) {
	t.Parallel()
	broker := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Username, o.Password = "app", secretOf("natspw")
	}})
	u, err := url.Parse(pgtest.Database(t, pgtest.Server(t)))
	harness.Must(t, err)
	plain := u.String()
	u.User = url.UserPassword("postgres", secretOf("pgurl"))
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace
	o := harness.New(t, u.String(), broker.URL(), harness.SlotName("support"), "NATS_USER=app",
		"REORDER_MODE=gap", "REORDER_BOUND=1h", "HEADERS=Type=event_type",
		"NATS_PASSWORD_FILE="+harness.WriteFile(t, "password", secretOf("natspw")+"\n"),
		fmt.Sprintf("POSTGRES_WRITE_URL=host=localhost port=%s user=postgres dbname=%s sslmode=disable "+
			"password='%s' sslpassword='%s'", u.Port(), u.Path[1:], quoted(secretOf("pgwrite")),
			quoted(secretOf("pgssl"))))
	o.UseStream(strings.ToUpper(o.Slot))
	o.Env = append(o.Env, "PGPASSWORD="+secretOf("pgenv"), "SOME_API_TOKEN="+secretOf("other"),
		"PGPASSFILE="+harness.WriteFile(t, "pgpass", "*:*:*:*:zqpgpass\\:/@71\n"))
	secrets := []string{secretOf("natspw"), secretOf("pgurl"), secretOf("pgwrite"), secretOf("pgssl"),
		secretOf("pgenv"), secretOf("other"), "zqpgpass:/@71"}
	rows := []string{"rowdoc-81", "rowactor-82", "rowpayload-83", "rowtype-84", "rowid-85"}

	conn := harness.Connect(t, plain)
	harness.Exec(t, conn, `CREATE TABLE outbox (id text, doc_id text, actor_id text, counter bigint, payload text,
		event_type text DEFAULT 'rowtype-84')`)
	o.Init()
	o.Start()
	insert := func(counter int, payload any) {
		t.Helper()
		harness.Exec(t, conn, `INSERT INTO outbox VALUES ('rowid-85', 'rowdoc-81', 'rowactor-82', $1, $2)`,
			counter, payload)
	}
	insert(1, "rowpayload-83")
	insert(3, "rowpayload-83") // waits for 2
	harness.Eventually(t, "a gap on the page", func() error {
		if _, body := o.Get("/status.json"); !strings.Contains(body, "rowdoc-81") {
			return errors.New(body)
		}
		return nil
	})
	log := []string{
		`time=2026-01-31T12:00:00Z level=WARN msg="late" doc_id=rowdoc-81 actor_id=rowactor-82 counter=7`,
		`time=2026-01-31T12:00:00Z level=INFO msg=ours password=zqlog1 url="postgres://me:zqlog2@db1.example/app"`,
		`{"level":"INFO","msg":"a \"token\": \"zqlog3\"","doc_id":"rowdoc-81","data":{"a":"rowpayload-83"}}`,
		`Authorization: Bearer zqlog4.abcdefghijkl`, `seed ` + seed + ` and`,
		`ERROR: duplicate key DETAIL: Key (doc_id, id)=(rowdoc-81, rowid-85) already exists.`,
		`Failing row contains (rowid-85, rowdoc-81, rowpayload-83).`,
		`-----BEGIN PRIVATE KEY-----`, `zqlog5`, `-----END PRIVATE KEY-----`,
		`payload="{\"a\": \"rowpayload-83\"}" msg="row id \"rowid-85\""`,
	}
	for _, s := range secrets { // where nothing says that it is one
		log = append(log, "it said "+s+" and "+strconv.Quote(s)+" and "+url.PathEscape(s))
	}
	logFile := harness.WriteFile(t, "outflow.log", strings.Repeat("x", 3<<20)+"\n"+strings.Join(log, "\n")+
		"\nthe last line is kept\n")
	secrets = append(append(secrets, rows...), "zqlog1", "zqlog2", "zqlog3", "zqlog4", "zqlog5", seed)

	all := unpacked(t, o, "--log", logFile)
	mustNotHold(t, all, secrets...)
	for name, wants := range map[string][]string{
		"manifest.json":             {`"slot": "` + o.Slot + `"`, `"missing": []`, "postgres/table.json"},
		"version.txt":               {"outflow ", "CPUs", "github.com/jackc/pgx"},
		"config.yaml":               {"reorder:", "mode: gap", "password_file", "***"},
		"status.json":               {`"verdict"`},
		"doctor.json":               {`"check": "slot.start"`},
		"process/status.json":       {`"pid"`, `"gaps"`},
		"process/metrics.txt":       {"outflow_"},
		"process/readyz.txt":        {"running"},
		"postgres/server.json":      {"PostgreSQL"},
		"postgres/settings.json":    {`"wal_level"`, "logical"},
		"postgres/slot.json":        {`"confirmed_flush_lsn"`, o.Slot},
		"postgres/publication.json": {`"pubinsert": true`, `"tablename": "outbox"`},
		"postgres/table.json":       {`"name": "payload"`, `"type": "text"`, `"default": true`},
		"nats/server.json":          {`"version"`},
		"nats/account.json":         {`"storage"`},
		"nats/stream.json":          {o.Stream, `"messages": 1`, "_outflow.***"},
		"nats/bucket.json":          {"KV_outflow-" + o.Stream},
		"nats/consumers.json":       {`"total"`},
		"nats/record.json":          {`"revision"`},
		"log.txt":                   {"level=WARN msg=\"late\"", "the last line is kept", "counter=7"},
		"":                          {"manifest", "Look at what is in it", "--mask-hosts"},
	} {
		if name == "" {
			wants = wants[1:]
		}
		for _, want := range wants {
			if !strings.Contains(all[name], want) {
				t.Errorf("%q does not hold %q:\n%s", name, want, all[name])
			}
		}
	}

	// a row that can't be published: its id is in why the process ended
	insert(2, nil)
	o.Wait()
	all = unpacked(t, o, "--log", harness.WriteFile(t, "ended.log", o.Said()))
	mustNotHold(t, all, secrets...)
	if !strings.Contains(all["nats/ended.json"], `"null_payload"`) ||
		!strings.Contains(all["log.txt"], "can't be published") ||
		!strings.Contains(all[""], "not read: process") {
		t.Errorf("%s%s%s", all["nats/ended.json"], all["log.txt"], all[""])
	}
}

// TestSupportWorksWhileServersAreAway: what could be read is there, and what could not is named. Secrets of
// the files that the settings name are hidden.
func TestSupportWorksWhileServersAreAway(t *testing.T) {
	t.Parallel()
	jwt := "eyJ0eXAiOiJKV1QifQ.eyJqdGkiOiJ6cWp3dCJ9.c2lnbmF0dXJlLXpx"
	creds := fmt.Sprintf("-----BEGIN NATS USER JWT-----\n%s\n------END NATS USER JWT------\n\n"+
		"-----BEGIN USER NKEY SEED-----\n%s\n------END USER NKEY SEED------\n", jwt, seed)
	ns := natstest.Server(t)
	database := pgtest.Database(t, pgtest.Server(t))
	for _, c := range []struct {
		name     string
		pg, nats string
		settings []string
		has      []string
		lacks    string
	}{
		{"PostgreSQL", "postgres://me:zqaway1@127.0.0.1:1/none?sslpassword=zqaway2", ns.URL(), nil,
			[]string{"nats/server.json", "status.json", "doctor.json"}, "postgres"},
		{"NATS with credentials", database, "nats://127.0.0.1:1",
			[]string{"NATS_CREDS=" + harness.WriteFile(t, "user.creds", creds)},
			[]string{"postgres/settings.json", "status.json", "doctor.json"}, "nats"},
		{"both, with an nkey", "host=127.0.0.1 port=1 password=zqaway1", "nats://127.0.0.1:1",
			[]string{"NATS_NKEY=" + harness.WriteFile(t, "user.nk", seed)}, []string{"status.json"}, "nats"},
		{"a token in the URL", "postgres://127.0.0.1:1/none", "nats://zqaway1@127.0.0.1:1", nil,
			[]string{"config.yaml"}, "postgres"},
		{"a token", "postgres://127.0.0.1:1/none", "nats://127.0.0.1:1",
			[]string{"NATS_TOKEN=zqaway1"}, []string{"config.yaml"}, "postgres"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := harness.New(t, c.pg, c.nats, harness.SlotName("supportaway"), c.settings...)
			text := jwt + " " + seed + "\n" + creds
			for _, secret := range []string{"zqaway1", "zqaway2"} {
				if strings.Contains(c.pg+c.nats+strings.Join(c.settings, ""), secret) {
					text += "as it is: " + secret + ".\n"
				}
			}
			all := unpacked(t, o, "--log", harness.WriteFile(t, "some.log", text), "--timeout", "1m")
			mustNotHold(t, all, "zqaway1", "zqaway2", jwt, seed)
			for _, name := range c.has {
				if all[name] == "" {
					t.Errorf("there is no %s", name)
				}
			}
			if !strings.Contains(all[""], "not read: "+c.lacks) ||
				!strings.Contains(all["manifest.json"], `"name": "`+c.lacks+`"`) {
				t.Errorf("%s%s", all[""], all["manifest.json"])
			}
		})
	}
	o := harness.New(t, database, ns.URL(), harness.SlotName("supportargs"))
	o.MustFail(2, []string{"support", "--log", "/nowhere/outflow.log"}, "--log", "/nowhere/outflow.log")
	o.MustFail(2, []string{"support", "--output", "/nowhere/report.tar.gz"}, "--output", "/nowhere")
	pipe := filepath.Join(t.TempDir(), "pipe")
	harness.Must(t, syscall.Mkfifo(pipe, 0o600))
	o.MustFail(2, []string{"support", "--log", pipe}, "--log "+pipe, "not a regular file")
	o.MustFail(2, []string{"support", "--output", pipe}, "--output "+pipe, "not a regular file")
	o.MustFail(2, []string{"support", "--timeout", "0s"}, "--timeout")
}

// TestSupportDoesNotWaitForAServerThatHangs: it says so, and has everything else.
func TestSupportDoesNotWaitForAServerThatHangs(t *testing.T) {
	t.Parallel()
	ns := natstest.Process(t)
	o := harness.New(t, pgtest.Database(t, pgtest.Server(t)), ns.URL(), harness.SlotName("supporthang"))
	o.Init()
	harness.Must(t, ns.Pause())
	t.Cleanup(func() { harness.Must(t, ns.Resume()) })
	all := unpacked(t, o, "--timeout", "2s")
	if !strings.Contains(all[""], "not read: nats") || all["doctor.json"] == "" || all["status.json"] == "" {
		t.Errorf("%s", all[""])
	}
}

func TestSupportMasksHostsWhenAsked(t *testing.T) {
	t.Parallel()
	o := harness.New(t, "postgres://me@zqdb.example.internal:1/app", "nats://zqbroker.example.internal:1",
		harness.SlotName("supporthosts"))
	log := harness.WriteFile(t, "some.log",
		"zqdb.example.internal said 10.11.12.13 and fd00:1:2::3, 127.0.0.1\n"+
			"application_name=outflow/s/zqpod-7 again 10.11.12.13\n")
	own, err := os.Hostname()
	harness.Must(t, err)
	all := unpacked(t, o, "--log", log, "--mask-hosts")
	mustNotHold(t, all, "zqdb", "zqbroker", "example.internal", "10.11.12.13", "fd00", "zqpod")
	if own != "outflow" && own != "localhost" {
		mustNotHold(t, all, own)
	}
	if text := all["log.txt"]; strings.Count(text, "address-1") != 2 || !strings.Contains(text, "127.0.0.1") {
		t.Errorf("%s", text)
	}
	names := func(text string) (all []string) {
		for _, word := range strings.FieldsFunc(text, func(r rune) bool {
			return !strings.ContainsRune(
				"abcdefghijklmnopqrstuvwxyz-0123456789", r)
		}) {
			if strings.HasPrefix(word, "host-") && !slices.Contains(all, word) {
				all = append(all, word)
			}
		}
		return all
	}
	if found := names(all["log.txt"]); len(found) != 2 || !strings.Contains(all["config.yaml"], found[0]) {
		t.Errorf("hosts %v: %s%s", found, all["log.txt"], all["config.yaml"])
	}
}
