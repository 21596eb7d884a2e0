package maintenance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestADocumentWithBlanksIsErased: PostgreSQL fills up a char(n), and messages have that; casts do without.
func TestADocumentWithBlanksIsErased(t *testing.T) {
	t.Parallel()
	f := harness.NewInstallation(t, pgtest.Server(t), natstest.Server(t).URL(), "eraseblanks",
		"SINK_DURABLE_AFTER=0s")
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	harness.Exec(t, f.Conn, "ALTER TABLE outbox ALTER doc_id TYPE char(6)")
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	settle(t, f)
	f.MustFail(2, []string{"erase", "--doc", "gone", "--request", "r", "--yes"}, `has it as "gone  "`)
	var c certificate
	harness.Eventually(t, "it is erased", func() error {
		settle(t, f)
		var said string
		var code int
		if c, said, code = erase(t, f, "--doc", "gone  ", "--request", "r", "--yes"); code != 0 {
			return fmt.Errorf("exit code %d: %s", code, said)
		}
		return nil
	})
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'gone'"); n != 0 ||
		c.Rows != 1 || c.Messages != 1 {
		t.Errorf("%d rows are left: %+v", n, c)
	}
	f.MustStop(t)
}

// TestADocumentIsErasedAsAFormerTypePrintedIt: its messages have it so, and the column's type of today does
// not. The certificate says that only they went.
func TestADocumentIsErasedAsAFormerTypePrintedIt(t *testing.T) {
	t.Parallel()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "formertype",
		"ARCHIVE_URL=file://"+t.TempDir())
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	archived(t, f, 1)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	harness.Exec(t, f.Conn, "ALTER TABLE outbox ALTER doc_id TYPE varchar(3) USING left(doc_id, 3)")
	f.Init()
	f.Start()
	f.MustFail(2, []string{"erase", "--doc", "lost", "--request", "l", "--yes"}, `has it as "los"`,
		"nothing that was looked through has it")
	args := []string{"--doc", "gone", "--request", "r"}
	f.MustFail(2, append([]string{"erase", "--notify", "{}", "--yes"}, args...), "leave out --notify")
	before, said, code := erase(t, f, args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, said)
	}
	c := erased(t, f, args...)
	after, said, code := erase(t, f, args...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, said)
	}
	for _, c := range []certificate{before, c} {
		if c.Rows != 0 || c.Messages != 1 || c.Archived != 1 ||
			!strings.Contains(fmt.Sprint(c.NotReached), "prints it today") {
			t.Errorf("%+v", c)
		}
	}
	if n := harness.Value[int](t, f.Conn, "SELECT count(*) FROM outbox WHERE doc_id = 'gon'"); n != 1 ||
		after.Messages != 0 || after.Archived != 0 {
		t.Errorf("%d rows are left, and afterwards there are %+v", n, after)
	}
	f.MustStop(t)
}

// TestWhatHadAnotherSubjectIsNamed: messages of the document were published and archived while `subject` was
// another one. The certificate says that they were passed over, and with that subject they are erased.
func TestWhatHadAnotherSubjectIsNamed(t *testing.T) {
	t.Parallel()
	const secret, doc, former = "S3CR3T", "gone", "SUBJECT=former.{doc_id}"
	store, dir := t.TempDir(), t.TempDir()
	nats := natstest.Server(t, natsserver.Options{Dir: store}).URL()
	f := harness.NewInstallation(t, pgtest.Server(t), nats, "formersubject",
		"ARCHIVE_URL=file://"+dir, "SINK_DURABLE_AFTER=0s")
	harness.Exec(t, f.Conn, harness.GeneratedKey)
	env := f.Env
	f.Set(former)
	f.Init()
	f.Start()
	harness.Insert(t, f.Conn, doc, 1, `{"of": "`+secret+`"}`)
	archived(t, f, 1)
	f.MustStop(t)
	harness.AwaitSlotFree(t, f.Conn, f.Slot)
	f.Env = env
	f.Start()
	harness.Insert(t, f.Conn, doc, 2, `{"of": "`+secret+`"}`)
	archived(t, f, ends(f))

	args := []string{"--doc", doc, "--request", "r"}
	c, said, code := erase(t, f, args...) // only says what would go, and does not read all for that
	if code != 0 || !strings.Contains(fmt.Sprint(c.NotReached), "segments of the archive") {
		t.Errorf("exit code %d: %+v\n%s", code, c, said)
	}
	c = erased(t, f, args...)
	said = fmt.Sprint(c.NotReached)
	if c.Messages != 1 || c.Archived != 1 || !strings.Contains(said, "`sink.dead_letter_subject` (") ||
		!strings.Contains(said, "run it again with that `subject`") ||
		!strings.Contains(said, "messages that do not say the document") {
		t.Errorf("%+v", c)
	}
	if found := filesWith(t, dir, secret); len(found) != 1 {
		t.Errorf("it is in %v", found)
	}
	f.Set(former)
	c, said, code = erase(t, f, append(args, "--yes")...)
	if code != 0 || c.Messages != 2 || c.Archived != 2 {
		t.Errorf("exit code %d: %+v\n%s", code, c, said)
	}
	for _, where := range []string{store, dir} {
		if found := filesWith(t, where, secret); len(found) > 0 {
			t.Errorf("it is still in %v", found)
		}
	}
	f.Env = env
	f.MustStop(t)
}

// TestWhatAnErasureSuggestsHasAllOfItsOptions: a last event can't be written any more when the rows are gone.
func TestWhatAnErasureSuggestsHasAllOfItsOptions(t *testing.T) {
	t.Parallel()
	f := newPublishing(t, pgtest.Server(t), natstest.Server(t).URL(), "erasesuggested")
	harness.Insert(t, f.Conn, "gone", 1, "{}")
	settle(t, f)
	f.MustRun("replay", "--to", "stream:"+f.Stream+"_PAST", "--from", "stream", "--doc", "gone")
	out, said, code := f.Run("erase", "--doc", "gone", "--request", "r", "--copy", f.Stream+"_PAST",
		"--notify", `{"erased": true}`, "--notify-key", "z", "--database", f.URL)
	if want := "To do it: `outflow erase --doc gone --request r --notify '{\"erased\": true}' " +
		"--notify-key z --database "; code != 0 || !strings.Contains(out, want) ||
		!strings.Contains(out, " --copy "+f.Stream+"_PAST --yes") {
		t.Errorf("exit code %d: %s%s", code, out, said)
	}
	f.MustStop(t)
}
