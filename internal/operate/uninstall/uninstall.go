// Package uninstall is `outflow uninstall`: the inverse of `outflow init`, for one slot.
//
// It reads everything first, says of each part that init makes what becomes of it, and refuses what would
// lose something that nobody has read. Only then, and only if it is told to, it removes.
//
// # The order, in which each step may be followed by a kill -9
//
//  1. The function of --sql-api goes first: whoever calls it then fails, before its events are lost.
//  2. The slot is the lock: without it no outflow publishes, and PostgreSQL refuses to drop one that is held.
//     From before the slot is read until it is dropped, the table is locked against writing: nothing is
//     committed that nobody would publish.
//  3. The publication; and the stream, if that was asked for. A stream that stays gets a new ingress, so that
//     an outflow that was asleep somewhere can't publish into it any more.
//  4. The record goes last, and then its bucket: it says which slot of which server was ours, so a run that
//     was cut is finished by the next one. Where a stream with messages stays, the record stays as well and
//     says up to which sequence they are: init goes on behind it.
//
// Each step checks what is there: what is gone already is not an error.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// Options say what to do.
type Options struct {
	Yes         bool     // do it; otherwise only say what would be done
	Stream      bool     // remove the stream and the bucket as well
	SQLAPI      bool     // remove outflow.enqueue as well
	Publication bool     // drop the publication also where it is not known to be unused
	Gone        string   // the side that is gone for good: GoneNATS or GonePostgres; "" if both are there
	Accept      []string // codes of refusals that are to be passed over

	Progress func(format string, args ...any) // called before what may take long, and after each step
	Hit      func(point string)               // called at points where tests kill the process; may be nil
}

// The sides that can be gone for good.
const (
	GoneNATS     = "nats"
	GonePostgres = "postgres"
)

// The codes that can be accepted.
const (
	codeUnpublished = "uninstall_unpublished"
	codeUnread      = "uninstall_unread"
	codeUnknown     = "uninstall_unknown"
	codeUnfinished  = "uninstall_unfinished"
	codeServer      = "uninstall_server"
	codeStandby     = "uninstall_standby"
)

var acceptable = []string{codeUnpublished, codeUnread, codeUnknown, codeUnfinished, codeServer,
	codeStandby}

// Report says what uninstall found, and what it did. The JSON names are stable.
type Report struct {
	Slot     string `json:"slot"`
	Stream   string `json:"stream"`
	Database string `json:"database"`
	Done     bool   `json:"done"` // everything that was to be removed is
	Parts    []Step `json:"parts"`
	// why nothing may be removed; those that were accepted are not among them
	Refused  []Refusal `json:"refused,omitempty"`
	Accepted []Refusal `json:"accepted,omitempty"`
	Notes    []string  `json:"notes,omitempty"`
}

// Step is what becomes of a part, in the order in which it is done.
type Step struct {
	Part   parts.Part `json:"part"`
	Name   string     `json:"name"`
	Action string     `json:"action"` // remove, keep or none: there is nothing
	Why    string     `json:"why,omitempty"`

	do func(ctx context.Context) error
}

// The actions.
const (
	Remove = "remove"
	Keep   = "keep"
	None   = "none"
)

// Refusal is a reason not to remove anything.
type Refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

// String is the step in a line, before it is done.
func (s Step) String() string {
	text := s.Part.Of(s.Name) + ": " +
		map[string]string{Remove: "would be removed", Keep: "stays", None: "not there"}[s.Action]
	if s.Why != "" {
		text += " (" + s.Why + ")"
	}
	return text
}

// Removes reports whether there is something to do.
func (r *Report) Removes() bool {
	return slices.ContainsFunc(r.Parts, func(s Step) bool { return s.do != nil })
}

// Lines are the report for a person.
func (r *Report) Lines() (lines []string) {
	for _, s := range r.Parts {
		if !r.Done || s.do == nil { // of the others it was said when it was done
			lines = append(lines, s.String())
		}
	}
	for _, a := range r.Accepted {
		lines = append(lines, fmt.Sprintf("accepted: %s (%s)", a.Message, a.Code))
	}
	for _, note := range r.Notes {
		lines = append(lines, "note: "+note)
	}
	for _, f := range r.Refused {
		lines = append(lines, fmt.Sprintf("refused: %s. %s", f.Message, f.Hint))
	}
	switch {
	case r.Done:
		lines = append(lines, fmt.Sprintf("slot %s is uninstalled", r.Slot))
	case !r.Removes():
		lines = append(lines, "There is nothing to remove")
	}
	return lines
}

// uninstall is one run.
type uninstall struct {
	cfg config.Config
	log *slog.Logger
	o   Options
	rep *Report

	conn  *sink.Conn
	store *checkpoint.Store
	pg    *catalog.Setup
	repl  *replication.Session

	table    string // schema.name, "" without rows
	tableOID uint32 // 0: there is none
	record   *checkpoint.Record
	corrupt  *outbox.Fault // why the record can't be read
	revision uint64
	slot     relay.SlotState
	stream   relay.StreamState
	server   relay.ServerState
	others   []checkpoint.Other
	unlisted error     // why the others are not known
	lock     *pgx.Conn // holds the lock on the table

	databases catalog.Databases
}

// Run reads, plans and, with Yes, removes. The report is nil only if nothing could be found out. A refusal
// that is not accepted is the error.
func Run(ctx context.Context, cfg config.Config, log *slog.Logger, o Options) (*Report, error) {
	for _, code := range o.Accept {
		if !slices.Contains(acceptable, code) {
			return nil, &outbox.Fault{Class: outbox.Usage, Code: "accept",
				Message: fmt.Sprintf("--accept %s is none of %v", code, acceptable),
				Hint:    "Look with `outflow uninstall`, which names the codes of what it refuses"}
		}
	}
	if !slices.Contains([]string{"", GoneNATS, GonePostgres}, o.Gone) {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "uninstall_gone",
			Message: fmt.Sprintf("--gone %s is neither nats nor postgres", o.Gone),
			Hint:    "Name the side that does not exist any more; what it had is gone with it"}
	}
	if o.Hit == nil {
		o.Hit = func(string) {}
	}
	u := &uninstall{cfg: cfg, log: log, o: o, rep: &Report{Slot: cfg.Slot, Stream: cfg.Stream}}
	defer u.close()
	for _, step := range []func(context.Context) error{u.open, u.read, u.check, u.plan} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	if len(u.rep.Refused) > 0 {
		r := u.rep.Refused[0]
		return u.rep, &outbox.Fault{Class: outbox.Fatal, Code: r.Code, Message: r.Message, Hint: r.Hint}
	}
	if !o.Yes || !u.rep.Removes() {
		return u.rep, nil
	}
	return u.rep, u.execute(ctx)
}

func (u *uninstall) execute(ctx context.Context) error {
	for _, s := range u.rep.Parts {
		if s.do == nil {
			continue
		}
		words := strings.Fields(string(s.Part))
		u.o.Hit("uninstall." + words[len(words)-1])
		if err := s.do(ctx); err != nil {
			return err
		}
		if s.Action == Remove {
			u.o.Progress("%s: removed", s.Part.Of(s.Name))
		} else {
			u.o.Progress("%s: %s", s.Part.Of(s.Name), s.Why)
		}
	}
	u.rep.Done = true
	return nil
}

// open connects to the servers that are there. The table may be gone: nothing of it is needed.
func (u *uninstall) open(ctx context.Context) error {
	if u.o.Gone != GoneNATS {
		if err := u.openNATS(ctx); err != nil {
			return away(err, GoneNATS)
		}
	} else if err := u.isGone(ctx, u.openNATS); err != nil {
		return err
	}
	if u.o.Gone != GonePostgres {
		return away(u.openPostgres(ctx), GonePostgres)
	}
	return u.isGone(ctx, u.openPostgres)
}

// away adds to the fault of a server that can't be reached what to do if it does not exist any more.
func away(err error, side string) error {
	f := outbox.FaultOf(err)
	if f == nil || f.Code != sink.CodeConnect && f.Code != postgres.CodeConnect {
		return err
	}
	named := *f
	named.Hint = fmt.Sprintf("See that it runs, and that host and port are right. If it is gone for good, "+
		"`outflow uninstall --gone %s` removes what the other server has", side)
	return &named
}

// noDatabase is the SQLSTATE of a server that is there without the database, and so without the slot.
const noDatabase = "3D000"

// goneAfter is how long a server that is said to be gone may take to answer.
const goneAfter = 5 * time.Second

// isGone returns an error if a server that is said to be gone answers.
func (u *uninstall) isGone(ctx context.Context, open func(context.Context) error) error {
	short, cancel := context.WithTimeout(ctx, goneAfter)
	defer cancel()
	u.o.Progress("trying for %v whether it is gone", goneAfter)
	err := open(short)
	f, state := outbox.FaultOf(err), postgres.SQLState(err)
	answers := err == nil || state != "" || f != nil && f.Class != outbox.Transient ||
		u.o.Gone == GoneNATS && u.conn != nil || u.o.Gone == GonePostgres && u.pg != nil
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case answers && state != noDatabase:
		return &outbox.Fault{Class: outbox.Usage, Code: "uninstall_gone", Err: err,
			Message: fmt.Sprintf("--gone %s, and it answers", u.o.Gone),
			Hint:    "Leave --gone out: what it has is to be removed as well"}
	}
	u.rep.Notes = append(u.rep.Notes, fmt.Sprintf("%s is taken to be gone: %v", u.o.Gone, err))
	return nil
}

func (u *uninstall) openNATS(ctx context.Context) (err error) {
	if u.conn, err = wiring.ConnectBroker(ctx, u.cfg, u.log); err != nil {
		return err
	}
	u.store = wiring.Store(u.cfg, u.conn)
	u.record, u.revision, err = u.store.Load(ctx)
	if u.corrupt = outbox.FaultOf(err); err != nil && (u.corrupt == nil || u.revision == 0) {
		return err
	}
	return nil
}

func (u *uninstall) openPostgres(ctx context.Context) (err error) {
	pc := wiring.Setup(u.cfg)
	if u.record != nil { // what the slot is of was settled when it was made
		pc.Table, pc.Shard = u.record.Mapping.Table, u.record.Mapping.Shard
	}
	u.table = pc.Table
	if u.pg, err = wiring.OpenSetup(ctx, u.cfg, pc); err != nil {
		return err
	}
	u.repl, err = wiring.Inspect(ctx, u.cfg, u.log)
	return err
}

func (u *uninstall) close() {
	if u.lock != nil {
		postgres.Close(u.lock)
	}
	if u.conn != nil {
		u.conn.Close()
	}
	if u.pg != nil {
		u.pg.Close()
	}
	if u.repl != nil {
		u.repl.Close()
	}
}

// read reads the rest, in the order of [checkpoint.Reader].
func (u *uninstall) read(ctx context.Context) (err error) {
	if u.o.Gone != GonePostgres {
		if u.slot, err = u.pg.Slot(ctx); err != nil {
			return err
		}
	}
	if u.o.Gone == GoneNATS {
		u.unlisted = errors.New("NATS is gone")
	} else if u.stream, err = u.conn.State(ctx); err != nil {
		return err
	}
	if u.o.Gone != GonePostgres {
		if u.server, err = u.repl.Server(ctx); err != nil {
			return err
		}
	} else if u.record != nil { // the other records are compared with it
		u.server.SystemID, u.server.Database = u.record.SystemID, u.record.Database
	}
	u.rep.Database, u.databases.Own = u.server.Database, u.server.Database
	if u.o.Gone != GonePostgres {
		if u.databases, err = u.repl.Databases(ctx); err != nil {
			return err
		}
	}
	if u.o.Gone != GonePostgres && u.table != "" {
		t, err := u.pg.Table(ctx)
		if err != nil && outbox.FaultOf(err) == nil {
			return err
		}
		u.tableOID = t.OID
	}
	if u.o.Gone == GoneNATS {
		return nil
	}
	if u.others, err = u.store.Others(ctx); err != nil {
		if ctx.Err() != nil {
			return err
		}
		u.others, u.unlisted = nil, err
	}
	return nil
}
