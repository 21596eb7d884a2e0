package maintain

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Monitor is what a process knows of itself, for its own pages, and leaves for others. It is safe for
// concurrent use.
type Monitor struct {
	// Load reads what the process before has left; nil, nil: nothing.
	Load func(context.Context) (*watch.Maintained, error)
	// Save leaves what this one knows. Where that fails, all goes on without.
	Save func(context.Context, *watch.Maintained) error
	// Survey reads the outbox's partitions; nil: it has none.
	Survey func(context.Context, catalog.Querier) (watch.Partitions, error)
	Log    *slog.Logger

	Host, Version string
	PID           int

	mu         sync.Mutex
	doc        watch.Maintained
	partitions watch.Partitions
	state      string
	since      time.Time
	limit      time.Duration // how long it may last, if the loop goes round
	waitsFor   string        // who has the lock, where this one stands by

	// The loop's alone.
	unread  bool   // what the process before has left could not be read
	unsaved string // that it was said of
}

// The states of a process, beside the part that it runs.
const (
	starting   = "starting"
	standingBy = "standing by"
	away       = "PostgreSQL can't be reached"
	idle       = "active: between rounds"
)

const (
	saving  = 5 * time.Second // to load, or to save
	longest = 25 * time.Hour  // a part takes less
)

func (m *Monitor) is(state string, limit time.Duration) { m.set(state, "", limit) }

// standsBy says that somebody else has the lock.
func (m *Monitor) standsBy(who string, limit time.Duration) { m.set(standingBy, who, limit) }

func (m *Monitor) set(state, waitsFor string, limit time.Duration) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waitsFor = waitsFor
	if m.state != state || state == idle {
		m.state, m.since = state, time.Now()
	}
	if state == standingBy || state == away { // these go on, attempt by attempt
		limit += time.Since(m.since)
	}
	m.limit = limit
}

// begin takes over what the process before has left: it may be this one. Where that can't be read, this one
// goes on with what it knows itself, and takes it over at the end of a round.
func (m *Monitor) begin(ctx context.Context, c *Config, once bool) {
	if m == nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, saving)
	defer cancel()
	before, err := m.Load(limited)
	if m.unread = err != nil; m.unread || before == nil { // the next round says that NATS is away
		own := m.Maintained()
		before = &own
	}
	doc := *before
	doc.Host, doc.PID, doc.Version, doc.Once, doc.Interval = m.Host, m.PID, m.Version, once, c.Every
	if once {
		doc.Interval = 0
		if before.Once {
			doc.Interval = max(time.Since(before.At).Round(time.Second), time.Second)
		}
	}
	doc.Parts = nil
	for _, p := range c.Parts {
		part := watch.MaintainPart{Name: p.Name}
		if b := before.Part(p.Name); b != nil {
			part = *b
		}
		doc.Parts = append(doc.Parts, part)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(c.Parts, func(p Part) bool { return p.Name == name })
	}
	if !has("archive") {
		doc.Archive = nil
	}
	if !has("stream") {
		doc.Kept = nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.doc = doc
}

// takeOver adds what the process before has left to what this one has found out meanwhile.
func (m *Monitor) takeOver(before *watch.Maintained) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.doc.Parts {
		p := &m.doc.Parts[i]
		b := before.Part(p.Name)
		switch {
		case b == nil || p.Succeeded.After(b.Succeeded):
		case p.Failing.IsZero(): // it was not run
			*p = *b
		default:
			p.Succeeded = b.Succeeded
			switch {
			case !b.Failing.IsZero(): // it has not worked since
				p.Failing = b.Failing
			case p.Failing.Before(b.Succeeded): // in this process, before another one had the lock
				p.Failing = b.Succeeded
			}
		}
	}
	own, theirs := m.doc.Archive, before.Archive
	if m.doc.Part("archive") != nil && (own == nil || theirs != nil && theirs.Sequence > own.Sequence) {
		m.doc.Archive = theirs // the archive grows
	}
	if m.doc.Kept == nil && m.doc.Part("stream") != nil {
		m.doc.Kept = before.Kept
	}
}

// run runs a part.
func (m *Monitor) run(ctx context.Context, p Part) error {
	if m == nil {
		return p.Run(ctx, &watch.Maintained{})
	}
	m.is("active: "+p.Name, longest)
	doc := m.Maintained()
	err := p.Run(ctx, &doc)
	if ctx.Err() != nil {
		return err
	}
	now := time.Now()
	for i := range doc.Parts {
		switch part := &doc.Parts[i]; {
		case part.Name != p.Name:
		case err != nil:
			part.Fail(err, now)
		default:
			part.Succeed(now)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.doc = doc
	return err
}

// end says what is known after a round, and leaves it for others. Of the partitions it knows where there is a
// connection to ask; the error says why they can't be read.
func (m *Monitor) end(ctx context.Context, conn *pgx.Conn) (unread error) {
	if m == nil || ctx.Err() != nil {
		return nil
	}
	if m.Survey != nil && conn != nil {
		limited, cancel := context.WithTimeout(ctx, answer) // the connection's other user waits
		found, err := watch.ReadPartitions(limited, conn, m.Survey)
		cancel()
		if unread = err; err != nil {
			m.Log.Debug("the outbox's partitions can't be read", "err", err)
		} else {
			m.mu.Lock()
			m.partitions = found
			m.mu.Unlock()
		}
	}
	ctx, cancel := context.WithTimeout(ctx, saving)
	defer cancel()
	if m.unread {
		if before, err := m.Load(ctx); err == nil && before != nil {
			m.takeOver(before)
		}
	}
	m.mu.Lock()
	m.doc.At = time.Now()
	m.mu.Unlock()
	doc := m.Maintained()
	said := ""
	if err := m.Save(ctx, &doc); err != nil {
		if said = kind(err); said != m.unsaved {
			m.Log.Warn("the status page can't be told what outflow maintain does", "err", err)
		}
	}
	m.unread, m.unsaved = m.unread && said != "", said
	return unread
}

// Maintained is what is known. It is the caller's.
func (m *Monitor) Maintained() watch.Maintained {
	m.mu.Lock()
	defer m.mu.Unlock()
	doc := m.doc
	doc.Parts = slices.Clone(doc.Parts)
	return doc
}

// Partitions is how the outbox's partitions were after the last round.
func (m *Monitor) Partitions() watch.Partitions {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.partitions
}

// WaitsFor is who has the lock, where this process stands by; otherwise "".
func (m *Monitor) WaitsFor() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waitsFor
}

// Active reports whether this process works.
func (m *Monitor) Active() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.active()
}

func (m *Monitor) active() bool {
	return m.state != "" && m.state != standingBy && m.state != away
}

// Alive reports whether the loop goes round. It depends on neither server: a restart would not bring them
// back.
func (m *Monitor) Alive() (ok bool, says string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state == "" || time.Since(m.since) < m.limit, m.says()
}

// Ready reports whether this process works without a fault, or stands by.
func (m *Monitor) Ready() (ok bool, says string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ok, says = m.state != "" && m.state != away, m.says()
	for _, p := range m.doc.Parts {
		if m.active() && !p.Failing.IsZero() {
			ok = false
			says += fmt.Sprintf("%s fails since %s: %s\n", p.Name, p.Failing.UTC().Format(time.RFC3339),
				p.Message)
		}
	}
	return ok, says
}

func (m *Monitor) says() string {
	state, since := m.state, ""
	if state == "" {
		state = starting
	} else {
		since = fmt.Sprintf(" for %v", time.Since(m.since).Round(time.Second))
	}
	if m.waitsFor != "" {
		since += ": at work is " + m.waitsFor
	}
	return state + since + "\n"
}
