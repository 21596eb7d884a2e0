// Package erase is `outflow erase`: it removes a document from the table, the stream, what copies the stream
// and the archive. What an erasure is, is in internal/lifecycle/erasure; this package does its steps in
// order, and each again if it has to.
package erase

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lazyregexp"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/operate/backfill"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

// Options say what to do.
type Options struct {
	Doc     string
	Request string
	Notify  []byte   // the payload of a last event; nil: there is none
	Key     string   // of that event, where the table has a column for it
	Copies  []string // other streams of the account that have copies of the messages
	Yes     bool     // do it; otherwise only say what would be done
	Wait    time.Duration

	// Parked deletes the events that consumers of these streams have parked and that is names, or only counts
	// them. hit is called behind each consumer that lost some.
	Parked func(ctx context.Context, api *jsapi.Client, streams []string, erase bool,
		is func(*erasure.Parked) bool, hit func()) (erasure.FoundParked, error)

	Hit func(point string) // called at points where tests kill the process; may be nil
}

// command is one run.
type command struct {
	cfg     config.Config
	log     *slog.Logger
	o       Options
	l       *backfill.Conns
	rd      backfill.Readings
	doc     *erasure.Document
	ledger  *erasure.Ledger
	rec     *erasure.Record
	rep     *Report
	stream  *stream.Stream
	store   archive.Store        // nil: there is no archive
	list    []streamInfo         // the account's streams
	stays   map[string][]uint64  // by place, messages of the document that may have to go
	reached map[[2]string]uint64 // by origin and filters, what the stream that was read last has from there
	held    outbox.Sequences     // of what the request has erased, what the stream that was read last has
	untold  map[string]uint64    // by place, messages that do not say which document they are of
	passed  int                  // segments of the archive that were not read: no message has its subject
	parked  erasure.FoundParked
	theirs  []string           // partitions that somebody else detached
	others  []checkpoint.Other // slots of other Outflows

	back      bool     // the stream has messages that are older than it is
	former    bool     // the column prints the document otherwise today
	empty     bool     // the archive has nothing of any stream of this name
	leftovers []string // objects of the archives of streams that are gone, which no manifest names
	// what is gone from the stream, and was not erased, and the archive lacks
	nowhere outbox.Sequences
}

// askTimeout bounds each request to JetStream.
const askTimeout = 30 * time.Second

var requestName = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)

func (o *Options) check() error {
	bad := func(format string, args ...any) error {
		return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: fmt.Sprintf(format, args...),
			Hint: "`outflow erase --help` says what each option is for"}
	}
	switch {
	case o.Doc == "":
		return bad("--doc is missing")
	case o.Request == "":
		return bad("--request is missing: give the erasure a name, such as gdpr-2026-41")
	case !requestName().MatchString(o.Request):
		return bad("--request %q can't be a name: letters, digits and . _ - are possible, at most 100",
			o.Request)
	case strings.Contains(o.Request, o.Doc):
		return bad("--request %q has the document in it, and outlives the erasure: give a name without %q",
			o.Request, o.Doc)
	case o.Wait < 0:
		return bad("--wait is less than 0")
	case o.Key != "" && o.Notify == nil:
		return bad("--notify-key is of the event that --notify writes")
	}
	return nil
}

// Run erases, or says what it would do. The report is nil only where nothing could be found out.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (_ *Report, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if err := wiring.NeedTable(cfg, "what an erasure remembers"); err != nil {
		return nil, err
	}
	if o.Hit == nil {
		o.Hit = func(string) {}
	}
	l, err := backfill.Open(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	ctx, explain := conns.WhileConnected(ctx, l.NATS)
	defer func() { err = explain(err) }()
	c := &command{cfg: cfg, log: log, o: o, l: l, stays: map[string][]uint64{}, untold: map[string]uint64{},
		stream: stream.New(l.NATS.API(), cfg.Stream, log)}
	if c.rd, err = l.Read(ctx); err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	if c.doc, err = erasure.NewDocument(cfg, l.Layout.Resolved, o.Doc); err != nil {
		return nil, err
	}
	if cfg.Archive.URL != "" {
		if c.store, err = archive.OpenThere(ctx, cfg.Archive.URL); err != nil {
			return nil, err
		}
		defer func() { _ = c.store.Close() }()
	}
	target := conns.Owner(cfg, c.rd.Server)
	if c.ledger, err = erasure.Open(ctx, target, l.PGC.Table, cfg.Slot); err != nil {
		return nil, err
	}
	defer c.ledger.Close()
	if role, err := pgx.ParseConfig(cfg.Postgres.URL); err == nil { // it was connected with
		c.ledger.Reader = role.User
	}
	m, err := partition.Open(ctx, target, partition.Config{Table: l.PGC.Table, Slot: cfg.Slot,
		ID: l.Layout.ID, OtherSlots: cfg.Retain.OtherSlots}, partition.Options{Hit: o.Hit})
	if err != nil {
		return nil, err
	}
	defer m.Close()
	c.rep = &Report{Request: o.Request, Table: l.Layout.Mapping.Table, Stream: cfg.Stream, Copies: []Copy{},
		Folders: []string{}, Databases: []string{}}
	if c.rec, err = c.ledger.Find(ctx, o.Request, o.Doc); err != nil {
		return nil, err
	}
	refused := m.CheckDocument(ctx, c.document())
	f := outbox.FaultOf(refused)
	switch c.former = refused != nil; {
	case refused != nil && (f == nil || f.Class != outbox.Usage):
		return nil, refused
	case c.former && o.Notify != nil && (c.rec == nil || c.rec.Cut == 0 && c.rec.Notified == ""):
		f.Hint += ", or leave out --notify: the event would have it otherwise"
		return nil, refused
	case c.rec != nil: // something had it
		refused = nil
	}
	if c.theirs, err = m.Theirs(ctx); err != nil {
		return nil, err
	}
	if c.others, err = l.Others(ctx, c.rd); err != nil {
		return nil, err
	}
	if err := c.copies(ctx); err != nil {
		return nil, err
	}
	if err := c.deletable(ctx); err != nil {
		return nil, err
	}
	if !o.Yes || refused != nil {
		rec, rep := c.rec, *c.rep
		switch err := c.plan(ctx, m); {
		case err == nil && refused != nil && !c.rep.any():
			f.Message += ", and nothing that was looked through has it in that form"
			return nil, refused
		case err != nil:
			return nil, err
		case !o.Yes:
			return c.rep, nil
		}
		c.rec, *c.rep = rec, rep
	}
	if err = c.erase(ctx, m); !c.rep.Erased { // it has not begun, and counted nothing
		return nil, err
	}
	return c.rep, err
}

// ready refuses where the record does not say what may go.
func (c *command) ready() error {
	refuse := func(format string, args ...any) error {
		return &outbox.Fault{Class: outbox.Fatal, Code: "erase_record", Message: fmt.Sprintf(format, args...)}
	}
	rec, st := c.rd.Record, c.rd.Stream
	switch {
	case c.rd.Corrupt != nil:
		return c.rd.Corrupt
	case !st.Exists:
		return refuse("stream %s does not exist", c.cfg.Stream)
	case st.Restoring != "":
		return refuse("stream %s is being restored", c.cfg.Stream)
	case rec == nil:
		return refuse("slot %s has no checkpoint record: nothing is confirmed", c.cfg.Slot)
	case !rec.Created.Equal(st.Created):
		return refuse("the checkpoint record of slot %s is of another stream %s, made at %v", c.cfg.Slot,
			c.cfg.Stream, rec.Created)
	case rec.Repairing != "" || rec.Creating:
		return refuse("a repair, a snapshot or init of slot %s has not finished", c.cfg.Slot)
	case rec.Stopped != "":
		return refuse("outflow run has stopped with %s", rec.Stopped)
	}
	return nil
}

// document is whose rows go.
func (c *command) document() partition.Document {
	d := partition.Document{Column: c.l.Layout.Mapping.Doc, Name: c.o.Doc, ID: c.l.Layout.ID,
		Noted: c.ledger.Rows(), Slot: c.cfg.Slot, Request: c.o.Request}
	if c.rec != nil {
		d.Keep = c.rec.Notified
	}
	return d
}

// begunNow is a request whose cut is now. One that has not come so far may have written its last event.
func (c *command) begunNow() *erasure.Record {
	rec := &erasure.Record{Cut: c.rd.Server.WALEnd, CutSeq: c.rd.Stream.LastSeq,
		Created: micro(c.rd.Stream.Created)}
	if c.rec != nil {
		rec.Notified = c.rec.Notified
	}
	return rec
}

// plan says what would go, of what is there now.
func (c *command) plan(ctx context.Context, m *partition.Manager) (err error) {
	r := c.rep
	if c.rec == nil || c.rec.Cut == 0 {
		c.rec = c.begunNow()
		if r.Rows, err = m.CountDocument(ctx, c.document()); err != nil {
			return err
		}
	} else {
		c.fill()
		r.Rows = 0 // they went before the cut was noted
	}
	found, err := c.find(ctx, c.cfg.Stream, c.rd.Stream.LastSeq, asItIs, c.inStream)
	if err != nil {
		return err
	}
	r.Messages = uint64(len(found))
	for i := range r.Copies {
		all, _, err := c.inCopy(ctx, r.Copies[i].Stream)
		if err != nil {
			return err
		}
		r.Copies[i].Messages = uint64(len(all))
	}
	if err := c.eraseParked(ctx, false); err != nil {
		return err
	}
	r.Archived = 0
	if err := c.eachFolder(ctx, func(a *archive.Archive, is func(*archive.Message) (bool, error)) error {
		for _, m := range a.Segments {
			if a.Lacks(m) {
				c.passed++
				continue
			}
			if err := a.Verify(ctx, m, func(m *archive.Message) error {
				yes, err := is(m)
				if yes {
					r.Archived++
				}
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	c.limits()
	return nil
}

// fill fills the report from the record.
func (c *command) fill() {
	r, rec := c.rep, c.rec
	requested := rec.Requested.UTC()
	r.Document, r.Requested = fmt.Sprintf("%x", rec.Document), &requested
	r.Notified, r.Rows, r.Cut, r.CutSequence = rec.Notified, rec.Rows, rec.Cut, rec.CutSeq
	r.Away = rec.Away
	r.Messages, r.Archived, r.Parked = rec.Erased.Count(), rec.Archived, rec.Parked
	for i := range r.Copies {
		r.Copies[i].Messages = rec.Copies[r.Copies[i].Stream]
	}
}

// erase does it, as far as that goes now.
func (c *command) erase(ctx context.Context, m *partition.Manager) (err error) {
	defer c.limits()
	if err := c.ledger.Alone(ctx); err != nil {
		return err
	}
	if c.rec, err = c.ledger.Begin(ctx, c.o.Request, c.o.Doc, c.rd.Server.SystemID, c.cfg.Stream,
		micro(c.rd.Stream.Created)); err != nil {
		return err
	}
	c.rep.Erased = true
	defer c.fill()
	c.o.Hit("erase.begun")
	// What was read before may be older than the cut of a run that has just ended.
	if c.rd.Server, err = c.l.Session.Server(ctx); err != nil {
		return err
	}
	if err := c.sameServer(); err != nil {
		return err
	}
	var waited time.Duration
	if c.rec.Cut == 0 {
		if waited, err = c.rows(ctx, m); err != nil {
			return err
		}
	}
	c.o.Hit("erase.cut")
	until := time.Now().Add(c.o.Wait - waited)
	confirmed, err := c.slots(ctx, until)
	if err != nil || !confirmed {
		return c.waits(err)
	}
	c.o.Hit("erase.confirmed")
	if err := c.messages(ctx, until); err != nil {
		return err
	}
	c.o.Hit("erase.messages")
	// A segment that is lost may take long to come back: what lies elsewhere does not wait for that. The run
	// that finishes looks for copies behind the archive all the same.
	failed := c.archive(ctx, until)
	c.o.Hit("erase.archived")
	if err := c.eraseCopies(ctx, until); err != nil {
		return errors.Join(failed, err)
	}
	c.restoring()
	c.o.Hit("erase.copies")
	if err := cmp.Or(c.eraseParked(ctx, true), failed); err != nil {
		return err
	}
	if len(c.rep.Waiting) > 0 {
		return c.waits(nil)
	}
	c.fill()
	c.limits()
	if err := c.ledger.Finish(ctx, c.rec, c.rep); err != nil {
		return err
	}
	finished := c.rec.Finished.UTC()
	c.rep.Finished = &finished
	c.o.Hit("erase.finished")
	return nil
}

// waits is the fault of what has to be waited for.
func (c *command) waits(err error) error {
	if err != nil {
		return err
	}
	return &outbox.Fault{Class: outbox.Transient, Code: partition.CodeWaits,
		Message: fmt.Sprintf("request %s has not finished: %s", c.o.Request,
			strings.Join(c.rep.Waiting, "; "))}
}

// sameServer refuses a cut of another cluster, or one that lies behind the end of WAL: its rows may be there
// again.
func (c *command) sameServer() error {
	if c.rec.System == c.rd.Server.SystemID && c.rec.Cut <= c.rd.Server.WALEnd {
		return nil
	}
	return &outbox.Fault{Class: outbox.Gap, Code: "erase_server",
		Message: fmt.Sprintf("request %s was begun on the database cluster %s, up to %v; this is %s, at %v",
			c.o.Request, c.rec.System, c.rec.Cut, c.rd.Server.SystemID, c.rd.Server.WALEnd)}
}

// rows deletes the rows, and notes the cut. It returns how long it has waited for transactions.
func (c *command) rows(ctx context.Context, m *partition.Manager) (time.Duration, error) {
	if c.o.Notify != nil && c.rec.Notified == "" {
		if err := c.notify(ctx); err != nil {
			return 0, err
		}
		c.o.Hit("erase.notified")
	}
	n, err := m.CountDocument(ctx, c.document())
	if err != nil {
		return 0, err
	}
	if c.rec.Rows == 0 { // a run that is killed forgets how many it has deleted
		c.rec.Rows = n
		if err := c.ledger.Save(ctx, c.rec); err != nil {
			return 0, err
		}
	}
	cut, err := m.EraseDocument(ctx, c.document(), c.o.Wait, func(ctx context.Context) (uint64, error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		st, err := c.stream.Tail(ctx)
		return st.LastSeq, err
	})
	if f := outbox.FaultOf(err); f != nil && f.Code == partition.CodeWaits {
		c.rep.Waiting = append(c.rep.Waiting, f.Message)
	}
	if err != nil {
		return 0, err
	}
	c.o.Hit("erase.deleted")
	c.theirs = cut.Theirs // somebody may have detached one, and an apply have seen it, since this began
	c.rec.Cut, c.rec.CutSeq, c.rec.Rows = cut.LSN, cut.Seq, max(c.rec.Rows, cut.Rows)
	return cut.Waited, c.ledger.Save(ctx, c.rec)
}

// poll is how often is looked whether the rest may go.
const poll = 500 * time.Millisecond

// pause waits a moment; false: there is no time left.
func pause(ctx context.Context, until time.Time) (bool, error) {
	if !time.Now().Before(until) {
		return false, ctx.Err()
	}
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(poll):
		return true, nil
	}
}

// slots waits until every slot has confirmed the cut.
func (c *command) slots(ctx context.Context, until time.Time) (_ bool, err error) {
	var readers partition.Readers
	named := c.cfg.Retain.OtherSlots
	if len(named) > 0 {
		if c.others, err = c.l.Others(ctx, c.rd); err != nil {
			return false, err
		}
		readers = c.l.Readers(c.rd, c.others)
	}
	takes := "" // outflow run confirms what its record has had for so long
	if least := c.cfg.Sink.DurableAfter; least > 0 {
		takes = fmt.Sprintf(" (outflow run takes %v at least: sink.durable_after)", least)
	}
	defer progress.Wait(ctx, fmt.Sprintf("waiting until every slot has confirmed %v%s", c.rec.Cut, takes))()
	for {
		behind, err := c.ledger.Behind(ctx, c.rec.Cut, readers, named, takes)
		if err != nil || len(behind) == 0 {
			return err == nil, err
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = behind
			return false, err
		}
	}
}

// micro is a time as PostgreSQL keeps it.
func micro(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }
