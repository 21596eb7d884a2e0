package producer_test

import (
	"io"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
	"github.com/outflowhq/outflow/producer"
)

// TestTheExamplesPrintWhatTheySay runs the examples that need a database, and compares what they print and
// leave.
func TestTheExamplesPrintWhatTheySay(t *testing.T) {
	url := pgtest.Database(t, pgtest.Server(t))
	t.Setenv("DATABASE_URL", url)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context()) //nolint:errcheck // the test is over
	outbox, err := producer.New(producer.Config{NextCounter: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL,
			actor_id text NOT NULL, counter bigint NOT NULL, payload jsonb NOT NULL)`,
		"CREATE TABLE note (id text, body text, version bigint)", "INSERT INTO note VALUES ('n1', '', 0)",
		outbox.Schema(),
	} {
		if _, err := conn.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	printed := printedBy(t, ExampleOutbox_Enqueue, ExampleOutbox_EnqueueSQL, ExampleReceipt, ExampleMessage)
	want := "36 1\n2\n1 2\n" +
		"producer: no transaction is open on the *pgx.Conn: the events would be published whatever becomes " +
		"of your own change. Begin one, make the change in it, and give it to Enqueue\ne1\n"
	if printed != want {
		t.Errorf("printed\n%s\nwant\n%s", printed, want)
	}
	rows, err := conn.Query(t.Context(), `SELECT concat_ws(' ', doc_id, actor_id, counter, payload)
		FROM outbox ORDER BY doc_id, actor_id, counter`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if all := []string{
		`n1 alice 1 {"op": "set", "text": "hello"}`, `n1 bob 1 {"op": "clear"}`,
		`n1 bob 2 {"op": "set", "text": "bye"}`, "n2 carol 1 {}", "n2 carol 2 {}",
	}; !slices.Equal(got, all) {
		t.Errorf("the table has\n%q, want\n%q", got, all)
	}
}

// printedBy returns what functions print to the standard output.
func printedBy(t *testing.T, functions ...func()) string {
	t.Helper()
	file, err := os.Create(t.TempDir() + "/out")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // it was read
	before := os.Stdout
	os.Stdout = file
	defer func() { os.Stdout = before }()
	for _, f := range functions {
		f()
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
