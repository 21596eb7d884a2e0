package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The versions of the record's JSON document. Each is named after what it added, and a record is written in
// the lowest version that can say what it has to: a program that does not know something refuses the record
// by its version, instead of taking it for corrupt. Version 1 is read and never written.
const (
	recordVersion = foundVersion // the newest

	foundVersion = 11 // what each attempt of it had found; version 10 is read with that, too
	begunVersion = 10 // what a repair that is under way has begun to publish
	// an owner, for a stream that clusters share; a hello, of a home for which others publish; checkpoints
	// with what a home has said, which version 8 had for a day
	clustersVersion = 9
	tallyVersion    = 8 // checkpoints with a tally, or with what a home has confirmed
	clusterVersion  = 7 // mappings with a control table or a subscription, and checkpoints of such
	gapVersion      = 6 // checkpoints in gap mode
	tableVersion    = 5 // the OID of the table that is published, and mappings without foreign transactions
	shardVersion    = 4 // mappings with a shard
	sourceVersion   = 3 // mappings with a source other than the table
	repairVersion   = 2 // repairing, stopped and base, and the broker's time beside a checkpoint
	oldestVersion   = 1
)

// Record is the checkpoint record: what a start needs to know beside the slot and the stream.
type Record struct {
	Version     int             `json:"v"`
	Slot        string          `json:"slot"`
	Database    string          `json:"database"`
	SystemID    string          `json:"system_id"`
	Publication PublicationSeen `json:"publication"`
	Mapping     relay.Mapping   `json:"mapping"`
	Stream      string          `json:"stream"`
	Created     time.Time       `json:"stream_created"`
	// init is about to make the slot; there is no checkpoint yet
	Creating bool `json:"creating,omitempty"`

	// Repairing is the code of the fault that a repair is under way for, or ForSnapshot. Without checkpoints
	// the slot is still to be made; with them, the newest is where the repaired outflow goes on, and what the
	// table has before it may not be published yet.
	Repairing string `json:"repairing,omitempty"`
	// Begun is what that repair has begun to publish; nil: nothing yet.
	Begun *Begun `json:"begun,omitempty"`
	// Stopped is the code of a fault that was seen to happen, and that readings need not show any more. It
	// stands until a repair accepts it: otherwise a supervisor that starts outflow again would pass over it.
	Stopped string `json:"stopped,omitempty"`
	// Base: a repair accepted the messages up to this sequence. Their headers are not compared with the WAL,
	// its end or its timelines. With Creating, see [Record.Uninstalled].
	Base uint64 `json:"base,omitempty"`

	// oldest first: from the confirmed one to the newest
	Checkpoints []StoredCheckpoint `json:"places"`
	// Holes are sequences whose messages the broker lost, ascending: those above the oldest checkpoint's
	// sequence, and those between the messages that it remembers.
	Holes []Range `json:"holes,omitempty"`

	// Owner is the cluster.id of whoever makes the stream that clusters share, in Epoch: it took that by
	// writing it here. Epoch 0: no other cluster may go on with the stream.
	Owner int    `json:"owner,omitempty"`
	Epoch uint64 `json:"epoch,omitempty"`
	// Confirmed is up to where all of the home's inputs are in that stream for good: what is published at a
	// checkpoint that an owner has found durable. Each revision from then on has a checkpoint at or above
	// it, and the broker loses neither that nor the messages up to there, so no start asks a slot for what
	// lies below. Only an owner can say so: a checkpoint may outlive messages that the broker has lost, and
	// a start is what finds that out. 0: nothing is confirmed yet.
	Confirmed outbox.LSN `json:"confirmed,omitempty"`
	// Cuts are those of the stream behind the oldest checkpoint, ascending: messages that were durable before
	// they came in here.
	Cuts []StoredCut `json:"cuts,omitempty"`

	// Hello is the number of the newest hello that the home may have said, where clusters share nothing; 0:
	// none, and nobody publishes for it.
	Hello uint64 `json:"hello,omitempty"`
	// Left is what was left to others, ascending, as far as a start from one of the checkpoints comes by it.
	Left []relay.Left `json:"left,omitempty"`
	// Heard is what the home has read of the others; nil: nothing yet. Its At is not before what any start
	// from a checkpoint reads: the rows between are passed over.
	Heard *relay.HomeState `json:"heard,omitempty"`

	// Claimed is what is published for the home whose rows are read, where clusters share nothing, ascending,
	// as far as a start from one of the checkpoints comes by it. All else of it is left out.
	Claimed []relay.Claimed `json:"claimed,omitempty"`
	// Reader is what was read of that home; nil: nothing yet. As of Heard, rows up to its At are passed over.
	Reader *relay.ReaderState `json:"reader,omitempty"`

	home *Record // of which Elsewhere has made it; nil: it is as it is stored
}

// ForSnapshot is what Repairing says while `outflow init --snapshot` publishes the rows that were there
// before the slot. A program that does not know it takes it for a repair, and refuses to run as well.
const ForSnapshot = "snapshot"

// Begun is what a repair that is under way has begun to publish, in all its attempts.
type Begun struct {
	Durable uint64 `json:"durable"` // what the broker had up to here when the first one began, it keeps
	// ascending: each published until the next one began
	Attempts []Attempt `json:"attempts"`
}

// Attempt is an attempt of a repair: behind a sequence it publishes rows in their order, each as one message.
type Attempt struct {
	Seq   uint64    `json:"seq"`
	Where string    `json:"where,omitempty"` // the rows for which this holds, and that were missing then
	Sum   uint64    `json:"sum"`             // of the hashes of their ids
	Found *Found    `json:"found,omitempty"` // nil: an older build does not say
	At    time.Time `json:"at"`              // when it began, by the broker's clock, UTC
}

// Found is what an attempt had found before it published.
type Found struct {
	Rows int `json:"rows"` // for which its condition holds, and that were in the stream
	// up to its Seq, with a message in stream or archive, or of which it is known why they have none
	Sequences int `json:"sequences"`
}

func (r *Record) validateBegun() error {
	if r.Begun == nil {
		return nil
	}
	if r.Repairing == "" || r.Repairing == ForSnapshot || r.Version < begunVersion {
		return fmt.Errorf("a repair was begun, in version %d, with repairing=%q", r.Version, r.Repairing)
	}
	for i, a := range r.Begun.Attempts {
		if a.At.IsZero() || i > 0 && a.Seq <= r.Begun.Attempts[i-1].Seq {
			return fmt.Errorf("attempt %d behind sequence %d, of %v", i, a.Seq, a.At)
		}
	}
	return nil
}

// PublicationSeen is the publication that the rows came through, and up to where that is known.
type PublicationSeen struct {
	relay.PublicationIdentity
	Seen outbox.LSN `json:"seen"` // it was right when the WAL ended here
}

// StoredCheckpoint is a checkpoint of the record.
type StoredCheckpoint struct {
	relay.Checkpoint
	Since time.Time `json:"since"` // when it was first stored, by the wall clock, UTC
	// the same by the broker's clock, or later; zero where that was not known
	Broker time.Time `json:"broker,omitzero"`
}

// Range is a range of stream sequences, both ends included.
type Range struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// With returns the record with the checkpoints and holes of an update, and what is published as it was when
// the WAL ended at seen.
func (r *Record) With(s Update, published relay.PublicationIdentity, seen outbox.LSN) *Record {
	c := *r
	c.Creating = false
	c.Checkpoints, c.Holes, c.Cuts = s.Checkpoints, s.Holes, cutsFrom(r.Cuts, s.Checkpoints)
	c.Left, c.Claimed = leftFrom(r.Left, s.Checkpoints), claimedFrom(r.Claimed, s.Checkpoints)
	if c.Epoch > 0 { // a server that was promoted may have gone back
		c.Confirmed = min(max(r.Confirmed, s.Confirmed), s.Checkpoints[len(s.Checkpoints)-1].Published())
	}
	if s.Heard != nil && max(r.Hello, s.Heard.Hello) > 0 {
		c.Heard, c.Hello = s.Heard, max(r.Hello, s.Heard.Hello) // the broker may have lost the number
	}
	if s.Reader != nil {
		c.Reader = s.Reader
	}
	c.Publication = PublicationSeen{published, max(c.Publication.Seen, seen)}
	return &c
}

// LostFirstCheckpoint tells a set-up that was complete, with a record of the first checkpoint that was lost
// again, with the end of the broker's files. Nothing was confirmed then but that checkpoint, which is what
// the slot still says: outflow init takes it from there, and run makes the messages again and compares.
func (r *Record) LostFirstCheckpoint(slot relay.SlotState, stream relay.StreamState) bool {
	return r.Creating && slot.Exists && stream.Created.Equal(r.Created)
}

// Uninstalled returns the sequence behind which `outflow init` goes on in a stream that `outflow uninstall`
// has left: up to there its messages belong to a slot that was dropped on purpose. 0: there is no such
// record, or the stream is another one. The record says so by being one of a slot that is about to be made,
// with a Base.
func (r *Record) Uninstalled(stream relay.StreamState) uint64 {
	if r == nil || !r.Creating || !stream.Created.Equal(r.Created) {
		return 0
	}
	return min(r.Base, stream.LastSeq)
}

// OfTable reports whether the record is of a table: by its OID, which another table of the server hardly has,
// or where an older build has written it by the name that the table had when init was last run. name "": by
// its OID only.
func (r *Record) OfTable(name string, oid uint32) bool {
	if r.Publication.TableOID == 0 {
		return name != "" && r.Mapping.Table == name
	}
	return r.Publication.TableOID == oid
}

// LeftBehind reports whether the record is what `outflow uninstall` has left: nobody makes its slot.
func (r *Record) LeftBehind() bool { return r.Creating && r.Base > 0 }

// Encode returns the record's JSON document. A record that Decode would refuse is an error.
func (r *Record) Encode() ([]byte, error) {
	c := *r
	c.Version = repairVersion
	switch {
	case c.Begun != nil:
		c.Version = begunVersion
		if slices.ContainsFunc(c.Begun.Attempts, func(a Attempt) bool { return a.Found != nil }) {
			c.Version = foundVersion
		}
	case c.Epoch > 0, c.Hello > 0, c.Reader != nil, c.Mapping.Cluster > 0,
		slices.ContainsFunc(c.Checkpoints, func(p StoredCheckpoint) bool { return p.Said != relay.Said{} }):
		c.Version = clustersVersion
	case slices.ContainsFunc(c.Checkpoints, func(p StoredCheckpoint) bool { return counts(p.Checkpoint) }):
		c.Version = tallyVersion
	case c.Mapping.Control != "":
		c.Version = clusterVersion
	case slices.ContainsFunc(c.Checkpoints, func(p StoredCheckpoint) bool { return p.Settings.ByGap() }):
		c.Version = gapVersion
	case c.Publication.TableOID != 0, c.Mapping.OwnOnly:
		c.Version = tableVersion
	case !c.Mapping.Shard.Whole():
		c.Version = shardVersion
	case c.Mapping.Source != relay.FromTable:
		c.Version = sourceVersion
	}
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("checkpoint record of slot %s: %w", r.Slot, err)
	}
	return json.Marshal(&c)
}

// Decode reads a record. It takes nothing for granted: an unknown version is fatal (code record_version),
// anything else that Encode could not have written is a gap (code record_corrupt), because where to go on
// from is not known then.
func Decode(doc []byte) (*Record, error) {
	var version struct {
		V int `json:"v"`
	}
	if err := json.Unmarshal(doc, &version); err != nil {
		return nil, corrupt(err)
	}
	if version.V > recordVersion {
		return nil, tooNew(version.V)
	}
	d := json.NewDecoder(bytes.NewReader(doc))
	d.DisallowUnknownFields()
	r := new(Record)
	if err := d.Decode(r); err != nil {
		return nil, corrupt(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, corrupt(errors.New("something follows the document"))
	}
	if err := r.validate(); err != nil {
		return nil, corrupt(err)
	}
	return r, nil
}

func tooNew(version int) error {
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "record_version",
		Message: fmt.Sprintf("the checkpoint record has version %d, this outflow reads versions up to %d",
			version, recordVersion),
		Hint: hintVersion,
	}
}

func corrupt(err error) error {
	return &outbox.Fault{
		Class: outbox.Gap, Code: "record_corrupt",
		Message: "the checkpoint record can't be read", Hint: hintCorrupt, Err: err,
	}
}

// validate holds what every reader of a record relies on.
func (r *Record) validate() error {
	switch {
	case r.Version < oldestVersion || r.Version > recordVersion:
		return fmt.Errorf("version %d", r.Version)
	case r.Slot == "" || r.SystemID == "" || r.Stream == "":
		return errors.New("slot, system identifier or stream is empty")
	case r.Mapping.Source.Rows() == (r.Mapping.Table == ""):
		return fmt.Errorf("source %v with table %q", r.Mapping.Source, r.Mapping.Table)
	case r.Mapping.Source != relay.FromTable && (!r.Mapping.Source.Messages() || r.Version < sourceVersion):
		return fmt.Errorf("source %v in version %d", r.Mapping.Source, r.Version)
	case !r.Mapping.Shard.Whole() && (r.Mapping.Source != relay.FromTable || r.Version < shardVersion):
		return fmt.Errorf("shard %v of source %v in version %d", r.Mapping.Shard, r.Mapping.Source, r.Version)
	case r.Publication.TableOID != 0 && (!r.Mapping.Source.Rows() || r.Version < tableVersion):
		return fmt.Errorf("table with OID %d of source %v in version %d", r.Publication.TableOID,
			r.Mapping.Source, r.Version)
	case r.Publication.TableOID == 0 && r.Publication.Path+r.Publication.Rewritten != "":
		return errors.New("no OID of the table that is published")
	case r.Mapping.OwnOnly && r.Version < tableVersion:
		return fmt.Errorf("own_only in version %d", r.Version)
	case r.Mapping.Control != "" && (r.Mapping.Source != relay.FromTable || r.Version < clusterVersion):
		return fmt.Errorf("control table of source %v in version %d", r.Mapping.Source, r.Version)
	case r.Mapping.Away() && (r.Mapping.Control == "" || r.Mapping.OwnOnly):
		return errors.New("a subscription without a control table, or of own transactions")
	case !r.Mapping.Away() && r.Mapping.Cluster == 0 && r.Publication.Subscription != "":
		return errors.New("what is published has a subscription, the mapping has none")
	case r.Mapping.Cluster != 0 && (r.Mapping.Control == "" || r.Epoch > 0 || r.Version < clustersVersion ||
		r.Mapping.Cluster < 0 || r.Mapping.Cluster > outbox.MaxCluster):
		return fmt.Errorf("cluster %d with control table %q, in epoch %d, in version %d", r.Mapping.Cluster,
			r.Mapping.Control, r.Epoch, r.Version)
	case r.Created.IsZero():
		return errors.New("no creation time of the stream")
	case r.Creating && r.Repairing != "":
		return errors.New("creating and repairing")
	case r.Creating && len(r.Checkpoints) > 0, !r.Creating && len(r.Checkpoints) == 0 && r.Repairing == "":
		return fmt.Errorf("%d checkpoints with creating=%t", len(r.Checkpoints), r.Creating)
	}
	for i, p := range r.Checkpoints {
		if p.Read != 0 != r.Mapping.Away() {
			return fmt.Errorf("checkpoint %d was read at %v, with subscription %q", i, p.Read,
				r.Mapping.Subscription)
		}
		// where a home is silent, checkpoints differ in where its rows are read; on both sides of a cut, in
		// what they hold
		differ := p.Read != 0 || i > 0 && r.Epoch > 0 && p.Seq > r.Checkpoints[i-1].Seq
		if i > 0 && (p.Due < r.Checkpoints[i-1].Due || p.Due == r.Checkpoints[i-1].Due && !differ ||
			p.Seq < r.Checkpoints[i-1].Seq) {
			return fmt.Errorf("checkpoint %d (%v, %d) does not follow the one before it", i, p.Due, p.Seq)
		}
		if i > 0 && (p.Start() < r.Checkpoints[i-1].Start() ||
			p.Published() < r.Checkpoints[i-1].Published()) {
			return fmt.Errorf("checkpoint %d starts at %v, before the one before it", i, p.Start())
		}
		if counts(p.Checkpoint) && (r.Mapping.Control == "" || r.Version < tallyVersion) {
			return fmt.Errorf("checkpoint %d with a tally in version %d, with control table %q", i, r.Version,
				r.Mapping.Control)
		}
		if p.Home != (relay.Confirmed{}) && (!r.Mapping.Away() || p.Home.LSN == 0 || p.Home.Timeline == 0) {
			return fmt.Errorf("checkpoint %d knows that its home has confirmed %v on timeline %d, with "+
				"subscription %q", i, p.Home.LSN, p.Home.Timeline, r.Mapping.Subscription)
		}
		if t := p.Tally; t.Since > p.Due || t.Since == 0 && t != (relay.Tally{}) {
			return fmt.Errorf("checkpoint %d at %v counts %d events since %v", i, p.Due, t.Events, t.Since)
		}
		if p.Settings.ByGap() && r.Version < gapVersion {
			return fmt.Errorf("checkpoint %d with sort %v in version %d", i, p.Settings.Sort, r.Version)
		}
		if err := validateCheckpoint(p); err != nil {
			return fmt.Errorf("checkpoint %d: %w", i, err)
		}
	}
	err := errors.Join(r.validateBegun(), r.validateOwner(), r.validateLeft(), r.validateReader())
	if err != nil {
		return err
	}
	for i, h := range r.Holes {
		if h.From == 0 || h.To < h.From || i > 0 && h.From <= r.Holes[i-1].To {
			return fmt.Errorf("hole %d (%d to %d) is out of order", i, h.From, h.To)
		}
	}
	return nil
}

// counts says that a checkpoint has what is known from tallyVersion on.
func counts(p relay.Checkpoint) bool {
	return p.Tally != relay.Tally{} || p.Home != relay.Confirmed{} || p.Said != relay.Said{}
}

func validateCheckpoint(p StoredCheckpoint) error {
	if p.Since.IsZero() {
		return errors.New("no time")
	}
	if len(p.PublishedAhead) > relay.MaxPublishedAhead {
		return fmt.Errorf("%d events taken, at most %d", len(p.PublishedAhead), relay.MaxPublishedAhead)
	}
	for i, t := range p.PublishedAhead {
		if t.LSN <= p.Due || i > 0 && t.Compare(p.PublishedAhead[i-1]) <= 0 {
			return fmt.Errorf("taken event %v is out of order", t)
		}
	}
	if err := validateGap(p.Checkpoint); err != nil {
		return err
	}
	return p.Settings.Sound()
}

// validateGap looks at what only gap mode has.
func validateGap(p relay.Checkpoint) error {
	switch {
	case !p.Settings.ByGap() && (len(p.Holds) > 0 || p.From != 0 || p.Remembered != 0):
		return fmt.Errorf("%d holds and %d messages remembered with sort %v", len(p.Holds), p.Remembered,
			p.Settings.Sort)
	case p.Settings.ByGap() && len(p.PublishedAhead) > 0:
		return fmt.Errorf("%d events taken with sort %v", len(p.PublishedAhead), p.Settings.Sort)
	case p.Remembered < 0 || p.Remembered > p.Settings.Gap.Memory || uint64(p.Remembered) > p.Seq:
		return fmt.Errorf("%d messages remembered of %d, at most %d", p.Remembered, p.Seq,
			p.Settings.Gap.Memory)
	case len(p.Holds) > relay.MaxHolds:
		return fmt.Errorf("%d holds, at most %d", len(p.Holds), relay.MaxHolds)
	case len(p.Holds) == 0:
		if p.From != 0 {
			return fmt.Errorf("starts at %v and holds nothing", p.From)
		}
		return nil
	case p.From == 0 || p.From >= p.Holds[0].Oldest.LSN:
		return fmt.Errorf("starts at %v, its oldest held event is %v", p.From, p.Holds[0].Oldest)
	}
	sequences := make(map[uint64]bool, len(p.Holds))
	for i, h := range p.Holds {
		if h.Oldest.LSN > p.Due || i > 0 && h.Oldest.Compare(p.Holds[i-1].Oldest) <= 0 {
			return fmt.Errorf("held event %v is out of order", h.Oldest)
		}
		if sequences[h.Sequence] {
			return fmt.Errorf("sequence %016x is held twice", h.Sequence)
		}
		sequences[h.Sequence] = true
	}
	return nil
}

// StoredAt notes that the record reached the store at t; [Store.Load] calls it. What its newest revision
// added can't have been there earlier, however long the message was on its way. What it added are the last
// checkpoints, which share a time; it need not be the latest one, as the clocks of those who wrote the others
// may have been ahead.
func (r *Record) StoredAt(t time.Time) {
	n := len(r.Checkpoints)
	if n == 0 {
		return
	}
	added := r.Checkpoints[n-1].Since
	for i := n - 1; i >= 0 && r.Checkpoints[i].Since.Equal(added); i-- {
		p := &r.Checkpoints[i]
		if t.After(p.Since) {
			p.Since = t.UTC()
		}
		if !p.Broker.IsZero() && t.After(p.Broker) {
			p.Broker = t.UTC()
		}
	}
}
