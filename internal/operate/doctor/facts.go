package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/lifecycle/partition"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/postgres"
	"github.com/outflowhq/outflow/sink"
)

// source is something that is read at once, with a time limit.
type source string

// The sources. Those below a connection are missing where it is.
const (
	srcPostgres      source = "the connection to PostgreSQL"
	srcReplication   source = "the replication connection"
	srcWriter        source = "the connection that heartbeats are written over"
	srcSettings      source = "PostgreSQL's settings"
	srcSlots         source = "the replication slots"
	srcActivity      source = "open transactions"
	srcServer        source = "PostgreSQL's statistics"
	srcTable         source = "the table"
	srcTableStats    source = "the table's statistics"
	srcPartitions    source = "the table's partitions"
	srcPublication   source = "the publication"
	srcRows          source = "the table's newest rows"
	srcSubscriptions source = "the subscriptions"
	srcParked        source = "parked events"
	srcMarks         source = "the marks of consumers"

	srcNATS      source = "the connection to NATS"
	srcAccount   source = "the JetStream account"
	srcStream    source = "the stream"
	srcRecord    source = "the checkpoint record"
	srcConsumers source = "the stream's consumers"

	srcHost    source = "this host"
	srcProcess source = "the process at listen"
	srcStandby source = "the standby"
)

// reportedBy names the check that reports why a source is missing, where that is a finding of its own.
var reportedBy = map[source]string{
	srcPostgres:    "postgres.reachable",
	srcReplication: "postgres.replication",
	srcWriter:      "postgres.writes",
	srcTable:       "table.usable",
	srcPublication: "publication.complete",
	srcNATS:        "nats.reachable",
	srcStream:      "stream.usable",
	srcRecord:      "record.readable",
	srcStandby:     "standby.reachable",
}

// connections are those without which nothing of a server is known.
var connections = map[source]bool{srcPostgres: true, srcReplication: true, srcWriter: true, srcNATS: true,
	srcStandby: true}

// below names the connection, or the source, that another one is read with.
var below = map[source]source{
	srcReplication: srcPostgres, srcWriter: srcReplication, srcSettings: srcPostgres, srcSlots: srcPostgres,
	srcActivity: srcPostgres,
	srcServer:   srcPostgres, srcParked: srcPostgres, srcMarks: srcPostgres, srcTable: srcPostgres,
	srcTableStats: srcTable, srcPartitions: srcTable,
	srcPublication: srcTable, srcRows: srcTable, srcSubscriptions: srcPostgres,
	srcAccount: srcNATS, srcStream: srcNATS, srcRecord: srcNATS, srcConsumers: srcNATS,
}

// missing says why a source could not be read.
type missing struct {
	err   error
	below source // the connection that is missing; "": this source itself could not be read
	right string // what grants it, where a right is missing; "": that is not why
}

func (m missing) String() string {
	switch {
	case m.below != "":
		return "needs " + string(m.below)
	case m.right != "":
		return fmt.Sprintf("the right to read it is missing: %s", m.right)
	}
	return m.err.Error()
}

// finding reports whether that a source is missing is wrong in itself, and not just unknown. A server that
// can be reached may have no WAL sender left for us, and one for outflow run.
func (m missing) finding(s source) bool {
	f := outbox.FaultOf(m.err)
	switch {
	case f == nil || m.below != "":
		return false
	case f.Code == postgres.CodeConnect, f.Code == sink.CodeConnect:
		return s != srcReplication
	}
	return f.Class != outbox.Transient
}

// Facts is what was read. A part whose source is missing is the zero value.
type Facts struct {
	Config     config.Config
	Layout     *wiring.Layout // the columns, where the table could be read
	BeforeInit bool
	Now        time.Time

	mu      sync.Mutex // sources are read beside one another, each into fields of its own
	missing map[source]missing

	Postgres      *Server           // srcPostgres, srcReplication
	Identity      relay.ServerState // srcReplication
	Writer        Writer            // srcWriter
	Settings      map[string]string // srcSettings, by name, in the unit of pg_settings
	Slots         []Slot            // srcSlots
	Waiting       watch.Waiting     // srcSlots
	Activity      Activity          // srcActivity
	Stats         Stats             // srcServer
	Table         TableStats        // srcTableStats
	Partitions    partition.Survey  // srcPartitions
	Publication   publication       // srcPublication
	Rows          Rows              // srcRows
	Subscriptions []Subscription    // srcSubscriptions
	Parked        []Parked          // srcParked
	Shared        []Shared          // srcMarks
	NATS          *Broker           // srcNATS
	Account       Account           // srcAccount
	Stream        Stream            // srcStream
	Maintained    *watch.Maintained // srcRecord; nil: outflow maintain was not run
	// slot, record, stream and server, in the order in which a start reads them
	Readings  checkpoint.Readings
	Consumers []Consumer    // srcConsumers
	Earlier   []Consumer    // the same some seconds before; nil without --deep
	Apart     time.Duration // between the two
	Host      Host          // srcHost
	Process   Process       // srcProcess
	Standby   *Standby      // srcStandby
}

type publication struct {
	Identity  relay.PublicationIdentity
	AllTables bool
	// others with the control table that publish its inserts and not its deletes
	NoDeletes []string
}

// known reports whether all these sources were read.
func (f *Facts) known(all ...source) bool {
	for _, s := range all {
		if _, gone := f.why(s); gone {
			return false
		}
	}
	return true
}

// why says why a source is missing, if it is.
func (f *Facts) why(s source) (missing, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	why, gone := f.missing[s]
	return why, gone
}

// slot is ours; nil: there is none.
func (f *Facts) slot() *Slot {
	for i := range f.Slots {
		if f.Slots[i].Name == f.Config.Slot {
			return &f.Slots[i]
		}
	}
	return nil
}

// hasSlot reports whether our slot is there, and is ours.
func (f *Facts) hasSlot() bool {
	s := f.slot()
	return s != nil && s.Plugin == "pgoutput" && s.WALStatus != "lost" && s.Invalidation == ""
}

func (f *Facts) hasStream() bool { return f.Stream.Config.Name != "" }

func (f *Facts) isArchived() bool { return f.hasStream() && f.Config.Archive.URL != "" }

func (f *Facts) isMaintained() bool { return f.Maintained != nil }

func (f *Facts) hasTable() bool { return f.Config.Source.Rows() && f.Layout != nil }

// reader reads the facts.
type reader struct {
	o      Options
	wanted map[source]bool
	log    *slog.Logger
	f      *Facts
}

// read reads what the wanted sources say.
func read(ctx context.Context, cfg config.Config, o Options, wanted map[source]bool) *Facts {
	r := &reader{o: o, wanted: wanted, log: o.Log, f: &Facts{
		Config: cfg, BeforeInit: o.BeforeInit, Now: time.Now(), missing: map[source]missing{},
	}}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Postgres.WriteURL == cfg.Postgres.URL {
		delete(wanted, srcWriter)
	}
	for s := range maps.Clone(wanted) {
		for s != "" {
			wanted[s], s = true, below[s]
		}
	}
	pg, broker := &pgReader{reader: r}, &natsReader{reader: r}
	defer pg.close()
	defer broker.close()
	inParallel(
		func() { pg.connect(ctx) },
		func() { broker.connect(ctx) },
		func() { r.from(ctx, srcHost, func(context.Context) error { return r.readHost() }) },
		func() { r.from(ctx, srcProcess, r.readProcess) },
		func() { r.from(ctx, srcStandby, r.readStandby) },
	)
	// In this order an outflow that runs meanwhile can't make them look like a loss, see [checkpoint.Reader].
	r.f.Readings.Asked = time.Now()
	pg.readSlots(ctx)
	broker.readRecord(ctx)
	broker.readStream(ctx)
	pg.readIdentity(ctx)
	r.f.Readings.Now = time.Now()
	inParallel(func() { pg.readRest(ctx) }, func() { broker.readRest(ctx) })
	return r.f
}

func inParallel(all ...func()) {
	var group sync.WaitGroup
	for _, do := range all {
		group.Go(do)
	}
	group.Wait()
}

// from reads a source, if it is wanted, what is below it is there, and nothing of it has failed before.
func (r *reader) from(ctx context.Context, s source, do func(ctx context.Context) error) {
	if !r.wanted[s] || !r.f.known(s) {
		return
	}
	if !r.f.known(below[s]) {
		why, _ := r.f.why(below[s])
		r.lacks(s, missing{err: why.err, below: cmp.Or(why.below, below[s])})
		return
	}
	if !connections[s] { // they say themselves what they wait for
		defer progress.Wait(ctx, "reading "+string(s))()
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.Timeout)
	defer cancel()
	err := do(ctx)
	if err == nil {
		return
	}
	why := missing{err: err}
	var rights noRight
	switch {
	case errors.As(err, &rights):
		why.right = string(rights)
	case ctx.Err() != nil && outbox.FaultOf(err) == nil:
		why.err = fmt.Errorf("no answer within %v", r.o.Timeout)
	}
	r.lacks(s, why)
}

func (r *reader) lacks(s source, why missing) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.f.missing[s] = why
}

// noRight is the error of a source that may not be read: what would allow it.
type noRight string

func (n noRight) Error() string { return string(n) }
