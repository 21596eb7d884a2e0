package consumer

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/internal/lab/tier"
	"github.com/outflowhq/outflow/outbox"
)

// TestInstancesInOtherLanguagesSurviveKillsBesideOnesInGo: two instances of examples/languages and one in Go
// share a consumer's partitions, and are killed and frozen while operations flow. Each document's effects are
// those of its messages in the stream, each once and in order. An outage of some seconds parks nothing. Then
// an event that fails for good is parked, with what follows in its document, and released.
func TestInstancesInOtherLanguagesSurviveKillsBesideOnesInGo(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	for language, program := range map[string]func(t *testing.T) []string{
		"TypeScript": typeScript, "Python": python, "Java": java,
	} {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			surviveKills(t, program(t))
		})
	}
}

// TestProgramsInOtherLanguagesAreShort: below 80 lines of code, but for Java.
func TestProgramsInOtherLanguagesAreShort(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"typescript/consumer.ts", "python/consumer.py"} {
		text, err := os.ReadFile(harness.Path("examples", "languages", filepath.FromSlash(program)))
		harness.Must(t, err)
		n := 0
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			if line != "" && !strings.HasPrefix(line, "//") && !strings.HasPrefix(line, "#") {
				n++
			}
		}
		if n >= 80 {
			t.Errorf("%s has %d lines of code", program, n)
		}
	}
}

func surviveKills(t *testing.T, program []string) {
	// An event that is refused must be tried five times under one lease, also on a machine that stands still.
	const strikes, lease = 12, 5 * time.Second
	url, nats := pgtest.Database(t, pgtest.Own(t, 0, "max_connections=200")), natstest.Server(t)
	o := harness.New(t, url, nats.URL(), "languages", "REORDER_SORT=commit")
	o.MustRun("init", "--sql-api")
	o.Start()
	conn := harness.Connect(t, url)
	harness.Exec(t, conn, `CREATE ROLE notes LOGIN; `+setup(t)+` CREATE SCHEMA notes; SET search_path = notes;
		CREATE TABLE state (document text PRIMARY KEY, events int NOT NULL, hash text NOT NULL);
		CREATE TABLE log (document text, n int, key text NOT NULL, operations int NOT NULL);
		CREATE TABLE turns (document text PRIMARY KEY, actor text NOT NULL, turns int NOT NULL);
		ALTER TABLE state ADD CHECK (document <> 'broken'); RESET search_path;
		GRANT USAGE ON SCHEMA notes TO notes; GRANT SELECT, INSERT, UPDATE ON notes.state TO notes`)

	env := []string{
		"PGOPTIONS=-c search_path=notes",
		"DATABASE_URL=" + strings.Replace(url, "//postgres@", "//notes@", 1),
		"JDBC_URL=" + jdbc(url),
		"NATS_URL=" + nats.URL(),
		"LEASE=" + lease.String(),
	}
	all := []*instance{
		startInstance(t, env, program...),
		startInstance(t, env, program...),
		newInstance(
			t,
			"-database",
			url,
			"-nats",
			nats.URL(),
			"-lease",
			lease.String(),
			"-partitions",
			"16",
			"-name",
			"notes",
			"-marks",
			"outflow",
		),
	}
	ops := dealt(t, 3_000, 8)
	l := harness.StartLoad(t, url, ops, 4, len(ops)/strikes, 1)
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	var asleep sync.WaitGroup
	for i := range strikes {
		time.Sleep(time.Duration(rnd.Int64N(int64(2 * time.Second)))) // when it is struck is random
		victim := all[i%len(all)]
		if i%4 != 3 {
			harness.Must(t, victim.p.Kill())
			victim.start()
			continue
		}
		p := victim.p
		harness.Must(t, p.Pause())
		asleep.Go(func() {
			time.Sleep(lease + lease/2)
			_ = p.Resume()
		})
	}
	asleep.Wait()
	l.Wait(t)
	harness.AwaitMessages(t, harness.JetStream(t, nats.URL()), o.Stream, len(ops))
	awaitEffects(t, conn, "notes", len(ops), all[0].p, all[1].p, all[2].p)
	sameAsStream(t, conn, harness.JetStream(t, nats.URL()), o.Stream)

	harness.Must(t, all[2].p.Signal(syscall.SIGTERM))
	harness.Must(t, all[2].p.Wait())
	harness.Exec(t, conn, `REVOKE INSERT ON notes.state FROM notes;
		INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('outage', 'ann', 1, '[]')`)
	time.Sleep(3 * time.Second) // the outage
	harness.Exec(t, conn, `GRANT INSERT ON notes.state TO notes`)
	awaitEffects(t, conn, "notes", len(ops)+1, all[0].p, all[1].p)
	harness.Exec(
		t,
		conn,
		`INSERT INTO outbox (doc_id, actor_id, counter, payload) VALUES ('broken', 'ann', 1, '[]'),
		('broken', 'ann', 2, '[]')`,
	)
	parked := func(n int) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("%d events are parked", n), func() error {
			var got int
			err := conn.QueryRow(t.Context(), `SELECT count(*) FROM outflow.outflow_parked`).Scan(&got)
			if err == nil && got != n {
				err = fmt.Errorf("%d", got)
			}
			return err
		}, all[0].p, all[1].p)
	}
	parked(2)
	harness.Exec(t, conn, `ALTER TABLE notes.state DROP CONSTRAINT state_document_check`)
	o.MustRun("parked", "retry", "--schema", "outflow", "notes", "broken")
	parked(0)
	awaitEffects(t, conn, "notes", len(ops)+3)
	sameAsStream(t, conn, harness.JetStream(t, nats.URL()), o.Stream)
	for _, i := range all[:2] {
		harness.Must(t, i.p.Signal(syscall.SIGTERM))
		if err := i.p.Wait(); err != nil {
			t.Errorf("the stop was not clean: %v", err)
		}
	}
}

// setup is the SQL with which the page says that tables and rights are made for the role notes.
func setup(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile(harness.Path("docs", "consume-any-language.md"))
	harness.Must(t, err)
	_, after, _ := strings.Cut(string(page), "```sql\nSELECT outflow.create_tables();")
	sql, _, found := strings.Cut(after, "```")
	if !found {
		t.Fatal("the page has no such setup any more")
	}
	return "SELECT outflow.create_tables();" + sql
}

// sameAsStream compares the table state with what the messages of the stream make it.
func sameAsStream(t *testing.T, conn *pgx.Conn, js jetstream.JetStream, stream string) {
	t.Helper()
	want := map[string]string{}
	template, err := outbox.ParseSubjectTemplate("outbox.{doc_id}")
	harness.Must(t, err)
	for _, m := range harness.Messages(t, js, stream) {
		document, _ := template.Value(m.Subject, "doc_id")
		sum := md5.Sum([]byte(want[document] + m.Outflow.Key + string(m.Data)))
		want[document] = hex.EncodeToString(sum[:])
	}
	rows, err := conn.Query(t.Context(), `SELECT document, hash FROM notes.state`)
	harness.Must(t, err)
	var document, hash string
	_, err = pgx.ForEachRow(rows, []any{&document, &hash}, func() error {
		if want[document] != hash {
			t.Errorf("document %s has the hash %s, want %s", document, hash, want[document])
		}
		delete(want, document)
		return nil
	})
	harness.Must(t, err)
	if len(want) > 0 {
		t.Errorf("documents without effects: %v", want)
	}
}

// typeScript builds the program, and returns its command.
func typeScript(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	harness.Must(t, os.CopyFS(dir, os.DirFS(harness.Path("examples", "languages", "typescript"))))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	run := func(args ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}
	var out []byte
	err := errors.New("not tried")
	for range 3 { // the network may fail
		if err != nil {
			out, err = run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
		}
	}
	if err != nil {
		tier.Missing(t, "npm", "the packages of the TypeScript example cannot be fetched: %v\n%s", err, out)
	}
	if out, err := run("node", filepath.Join("node_modules", "typescript", "bin", "tsc")); err != nil {
		t.Fatalf("tsc: %v\n%s", err, out)
	}
	return []string{"node", filepath.Join(dir, "built", "consumer.js")}
}

// python returns the command of the program.
func python(t *testing.T) []string {
	t.Helper()
	if out, err := exec.Command("python3", "-c", "import nats, psycopg").CombinedOutput(); err != nil {
		tier.Missing(t, "python-drivers", "python3 has not nats-py and psycopg: %v\n%s", err, out)
	}
	return []string{"python3", "-B", harness.Path("examples", "languages", "python", "consumer.py")}
}

// java compiles the program, and returns its command.
func java(t *testing.T) []string {
	t.Helper()
	drivers, dir := os.Getenv("CLASSPATH"), t.TempDir()
	if !strings.Contains(drivers, "jnats") || !strings.Contains(drivers, "postgresql") {
		tier.Missing(
			t,
			"java-drivers",
			"CLASSPATH has not jnats and the JDBC driver of PostgreSQL: %q",
			drivers,
		)
	}
	home := harness.Path("examples", "languages", "java")
	build := exec.Command("javac", "-d", dir, filepath.Join(home, "Consumer.java"),
		filepath.Join(home, "Application.java"))
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return []string{"java", "-cp", dir + string(os.PathListSeparator) + drivers, "Consumer"}
}

// jdbc is the address of a database in the form of Java's driver.
func jdbc(url string) string {
	address := strings.TrimPrefix(url, "postgres://postgres@")
	return "jdbc:postgresql://" + address + "&user=notes&currentSchema=notes"
}
