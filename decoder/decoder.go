package decoder

import (
	"errors"
	"fmt"
	"math"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Config says what to read. The zero value of an optional field means that there is none.
type Config struct {
	TableOID uint32        // the outbox; of a partitioned one the root; 0 where Mapping.Source has none
	Mapping  relay.Mapping // column names by role
	ID       string        // the id column, optional
	Extra    []string      // further columns for Event.Extra, at most relay.MaxExtra; optional
	Slot     string        // changes of settings for other slots are no inputs
	Control  uint32        // OID of Mapping.Control; 0 where there is none
	// Origin is the replication origin of Mapping.Subscription: transactions with another one, or none, are
	// no inputs. "" where there is no such subscription.
	Origin string
	// Clusters says of which cluster a transaction with a replication origin is, by the origin's name; the
	// one without a name is this cluster's own. Cluster rows of others are passed over; without it all are.
	Clusters map[string]int

	// Unread is a table, as schema.name, whose rows somebody may mean as events although Mapping.Source says
	// that rows are none. They are counted. Optional.
	Unread string

	// MaxPayload is in bytes of the payload as it would be published. A larger one is not copied: the event
	// then has its PayloadSize and no Payload. 0: no limit.
	MaxPayload int
}

// Kind says what a message has brought.
type Kind uint8

// The kinds of result.
const (
	Nothing Kind = iota // nothing to act on
	Event               // an insert into the outbox, or a message in place of it, in Result.Event
	Commit              // the end of a transaction, in Result.Commit
)

// Ignored says what was passed over that somebody may have meant as an event.
type Ignored uint8

// The kinds of what is ignored.
const (
	NothingIgnored Ignored = iota
	IgnoredMessage         // a message event, where Mapping.Source says that messages are none
	// a message event outside of any transaction: it stays in the WAL whatever becomes of its writer's
	IgnoredOutside
	IgnoredRow // a row of Config.Unread
)

// String is a word for metrics and logs.
func (i Ignored) String() string {
	return [...]string{"nothing", "message", "not_transactional", "row"}[i]
}

// Result is what one message gives. The caller may reuse it: Decode overwrites all of it.
type Result struct {
	Kind   Kind
	Event  relay.Event
	Commit relay.Commit
	// Watermark is what the home said of itself in the transaction, with Commit; its LSN is 0 where it said
	// nothing, and where this server is the home.
	Watermark relay.Watermark
	// ClusterRows are those of the transaction, with Commit, in their order. They come from each cluster of
	// Config.Clusters, whatever else of its transactions is an input. They are the caller's.
	ClusterRows []relay.ClusterRow
	// Malformed says that a transactional message was meant as a change of this slot's settings, or a
	// control row as a watermark, and can't be read as one: it is malformed or of an unknown version. It is
	// no input: to be counted and logged. Kind is Nothing then.
	Malformed error
	Ignored   Ignored // it is no input either
	// Missing says that the rows that follow lack a mapped column. Events of them are marked as such, unless
	// it is the key and can be made of actor and counter; whether the table lacks it still is for the caller
	// to ask, because that needs somebody to act.
	Missing bool
}

// Decoder reads the messages of one replication session, in order. It is not safe for concurrent use.
type Decoder struct {
	cfg Config
	err error // the first one; nothing is decoded after it

	plan     *plan        // how to read the outbox's rows; nil before its first Relation message
	control  *controlPlan // likewise of Config.Control
	arena    arena
	cells    []cell // of the present row, by the plan's columns
	scratch  [maxFixed]byte
	last     outbox.LSN // end LSN of the last commit
	home     outbox.LSN // of the last one with Config.Origin: its end LSN at home
	inCommit bool       // between Begin and Commit
	tx       transaction

	content content        // of the present message event
	extraAt map[string]int // the index in Config.Extra of a header of a message event
	unread  uint32         // OID of Config.Unread; 0: not seen
}

// transaction is what is known of the one that is being read.
type transaction struct {
	final     outbox.LSN // LSN of the commit record's start, from Begin
	events    uint32
	tick      bool
	foreign   bool            // it is none whose content can be an input
	home      outbox.LSN      // its end LSN at home; 0: it is not of Config.Origin
	settings  *relay.Settings // the last well-formed change for this slot
	watermark relay.Watermark // the last well-formed one

	cluster int                // of Config.Clusters, that committed it; 0: none
	there   outbox.LSN         // where it was committed: no commit before it ends above that
	rows    []relay.ClusterRow // the well-formed ones
}

// New returns a decoder for a session that starts.
func New(cfg Config) *Decoder {
	d := &Decoder{cfg: cfg, extraAt: make(map[string]int, len(cfg.Extra))}
	for i, name := range cfg.Extra {
		d.extraAt[name] = i
	}
	if n := len(cfg.Extra); n > relay.MaxExtra {
		d.err = &outbox.Fault{
			Class: outbox.Usage,
			Code:  "too_many_columns",
			Message: fmt.Sprintf("subject and headers use %d further columns of table %s", n,
				cfg.Mapping.Table),
			Hint: fmt.Sprintf("Use at most %d.", relay.MaxExtra),
		}
	}
	return d
}

// InTransaction reports whether the last message lies between a Begin and its Commit: a keepalive then says
// nothing about how far the WAL has been read.
func (d *Decoder) InTransaction() bool { return d.inCommit }

// Complete returns up to where all inputs were read: each that ends above comes with the transaction that is
// being read, or behind it. 0: none were. Where a home's rows are read, it is an LSN of the home; of its
// transactions Origin says where they end, behind Begin.
func (d *Decoder) Complete() outbox.LSN {
	switch away := d.cfg.Mapping.Away(); {
	case away && d.inCommit && d.tx.home > 0:
		return max(d.home, d.tx.home-1)
	case away:
		return d.home
	case d.inCommit:
		return d.tx.final
	}
	return d.last
}

// Decode reads one message of pgoutput, protocol version 1, and says in r what it brought. msg is not kept.
//
// An error ends the session: it is returned again for whatever comes after. It is [ErrNeedText] where binary
// values must be turned off, and otherwise says where the bytes are not what the protocol allows.
func (d *Decoder) Decode(msg []byte, r *Result) error {
	*r = Result{}
	if d.err == nil {
		m := reader{b: msg}
		if d.err = d.message(&m, r); d.err != nil {
			*r = Result{}
		}
	}
	return d.err
}

// message reads any message. Those that say nothing about the outbox are read all the same, so that what the
// server sends is either understood whole or refused.
func (d *Decoder) message(m *reader, r *Result) error {
	kind := m.u8()
	switch kind {
	case 'B', 'M':
	case 'C', 'O', 'R', 'Y', 'I', 'U', 'D', 'T':
		if !d.inCommit {
			return d.protocol(m, "outside of a transaction")
		}
	default:
		if len(m.b) == 0 {
			return d.protocol(m, "an empty message")
		}
		return d.protocol(m, "not a message of protocol version 1")
	}
	var err error
	switch kind {
	case 'I':
		err = d.insert(m, r)
	case 'B':
		err = d.begin(m)
	case 'C':
		err = d.commit(m, r)
	case 'R':
		err = d.relation(m, r)
	case 'M':
		err = d.logical(m, r)
	case 'U', 'D':
		err = d.change(m, kind)
	case 'T':
		relations := uint64(m.u32())
		m.u8() // CASCADE, RESTART IDENTITY
		m.skip(uint32(min(4*relations, math.MaxUint32)))
	case 'O':
		d.origin(m)
	case 'Y':
		m.u32() // OID
		m.text()
		m.text()
	}
	if err != nil {
		return err
	}
	return d.end(m)
}

// end is the check that every message ends with: all of it was there, and nothing after it.
func (d *Decoder) end(m *reader) error {
	switch {
	case m.short:
		return d.protocol(m, "ends in the middle of a field")
	case m.off != len(m.b):
		return d.protocol(m, "goes on after its end")
	}
	return nil
}

func (d *Decoder) begin(m *reader) error {
	if d.inCommit {
		return d.protocol(m, "inside a transaction")
	}
	final := outbox.LSN(m.u64())
	m.u64() // commit timestamp, again in Commit
	m.u32() // transaction id
	if err := d.end(m); err != nil {
		return err
	}
	// where a home's rows are read, what is of no origin was written here
	d.inCommit, d.tx = true, transaction{final: final, foreign: d.cfg.Mapping.Away(),
		cluster: d.cfg.Clusters[""], there: final}
	return nil
}

// origin takes note of where the transaction was replicated from: from the home, or from elsewhere.
func (d *Decoder) origin(m *reader) {
	lsn := outbox.LSN(m.u64()) // the end LSN that it had there
	name := m.text()
	d.tx.cluster, d.tx.there = 0, lsn
	if len(d.cfg.Clusters) > 0 && len(name) > 0 {
		d.tx.cluster = d.cfg.Clusters[string(name)]
	}
	if !d.cfg.Mapping.Away() {
		d.tx.foreign = d.cfg.Mapping.OwnOnly
		return
	}
	if d.tx.foreign = d.cfg.Origin == "" || string(name) != d.cfg.Origin; !d.tx.foreign {
		d.tx.home = lsn
	}
}

func (d *Decoder) commit(m *reader, r *Result) error {
	flags, start, end := m.u8(), outbox.LSN(m.u64()), outbox.LSN(m.u64())
	c := relay.Commit{LSN: end, Start: start, Time: int64(m.u64())}
	if err := d.end(m); err != nil {
		return err
	}
	switch {
	case flags != 0:
		return d.protocol(m, "unknown flags %#x", flags)
	case start != d.tx.final:
		return d.protocol(m, "commit LSN %v is not the one that Begin announced", start)
	case end <= start:
		return d.protocol(m, "end LSN %v is not after the commit LSN", end)
	case end <= d.last:
		return d.protocol(m, "end LSN %v is not after that of the commit before, %v", end, d.last)
	}
	tx := &d.tx
	if d.cfg.Mapping.Away() {
		// As at home: the position, and the time, which the commit record has from there. Where its commit
		// record started there is not known: not before the end of the one that came before.
		c.Read, c.LSN, c.Start = end, tx.home, d.home
		if tx.foreign {
			c.LSN, c.Start = 0, 0
		} else if tx.home <= max(d.home, 1) {
			return d.protocol(m, "its end LSN at home, %v, is not after that of the one before, %v", tx.home,
				d.home)
		}
		d.home = max(d.home, tx.home)
	}
	switch {
	case tx.events > 0:
		c.Kind, c.Events = relay.Events, int(tx.events)
	case tx.settings != nil:
		c.Kind, c.Settings = relay.SettingsChange, *tx.settings
	case tx.tick:
		c.Kind = relay.Heartbeat
	}
	d.inCommit, d.last = false, end
	r.Kind, r.Commit, r.Watermark, r.ClusterRows = Commit, c, tx.watermark, tx.rows
	return nil
}

// protocol makes the error for bytes that protocol version 1 does not allow. It carries no class: the session
// is dropped and the WAL read again.
func (d *Decoder) protocol(m *reader, format string, args ...any) error {
	name := "no"
	if len(m.b) > 0 {
		name = messageName(m.b[0])
	}
	where := fmt.Sprintf("in the transaction with commit LSN %v", d.tx.final)
	if !d.inCommit {
		where = fmt.Sprintf("after the commit that ends at %v", d.last)
	}
	return fmt.Errorf("pgoutput: %s message %s, at byte %d of %d: %s", name, where, m.off, len(m.b),
		fmt.Sprintf(format, args...))
}

func messageName(kind byte) string {
	switch kind {
	case 'B':
		return "Begin"
	case 'C':
		return "Commit"
	case 'O':
		return "Origin"
	case 'R':
		return "Relation"
	case 'Y':
		return "Type"
	case 'I':
		return "Insert"
	case 'U':
		return "Update"
	case 'D':
		return "Delete"
	case 'T':
		return "Truncate"
	case 'M':
		return "Message"
	}
	return fmt.Sprintf("%q", kind)
}

// errTooManyEvents takes a COPY: a transaction has no more commands than that, but one command may bring more
// rows.
var errTooManyEvents = errors.New("decoder: more events in one transaction than a position can number")
