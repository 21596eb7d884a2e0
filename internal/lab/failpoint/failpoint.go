// Package failpoint lets outflow run kill itself at a named point, for tests of what is found again
// afterwards: a kill from outside almost never hits the moment between a message that is stored and its
// acknowledgement that is read.
//
// The environment variable OUTFLOW_FAILPOINT arms it; it is no setting and for tests alone. Its value is a
// list, comma-separated, of
//
//	<point>:<n>            kill -9 of this process when it comes to the point for the n-th time, see Names
//	stop.<point>:<n>       the same with kill -STOP: it goes on when it gets SIGCONT
//	spill.full:<n>         from the n-th write on, all writes to scratch files fail as on a full disk
//	spill.full:<n>+<k>     the same, and after k failures there is room again
//	clock:<duration>       the record is used as by a machine whose clock is ahead (1h) or behind (-1h)
//
// Where it is not set, nothing is wrapped and nothing is counted. What is counted goes on from session to
// session.
//
// The points lie around the calls between the pipeline and what it is connected to:
//
//	memory    the newest counters of the stream are read, in gap mode
//	start     the stream is started
//	publisher the session has read where the stream ends, and begins to publish behind it
//	publish   a message is handed to the publisher
//	flush     messages go on the wire; after: they have been written
//	ack       an acknowledgement was read, and the pipeline does not know yet
//	record    the checkpoint record is stored; after: it is, and the pipeline does not know yet
//	confirm   a new LSN is handed over to be confirmed
//	tick      a heartbeat is written into the WAL
//	change    a change of settings is written into the WAL
//	spill     before: a scratch file is made; after: something was written to it for the first time
//
// Those of outflow uninstall come before what they name is removed: uninstall.function, .slot, .publication,
// .stream, .record and .bucket.
//
// Those of outflow init --snapshot are steps, in this order:
//
//	snapshot.begin, .begun          before and after the record says that it is under way
//	snapshot.known                  the ids of what the stream has are known
//	snapshot.slot, .made, .taken    before and after the slot is made; its snapshot is taken
//	snapshot.row                    a row was handed to the publisher
//	snapshot.published, .durable    all is acknowledged; nothing of it can be lost any more
//	snapshot.finished               the record is complete
//
// Those of outflow partition apply:
//
//	partition.made, .attached       a partition is made, and not attached yet; it is
//	partition.detaching, .detached  before and after DETACH
//	partition.sealing, .sealed      the fence is set; that is committed
//	partition.durable, .archived    every slot has confirmed the fence; the archive has it
//	partition.compared, .verified   all rows are published; before the lock that it is dropped under
//	partition.dropping, .dropped    it is dropped; that is committed
//	partition.deleted               rows of a plain table are deleted
//
// Those of outflow archive run:
//
//	archive.message                 a message was read
//	archive.begin, .written         before and after a segment's messages are written
//	archive.verified, .manifest     they were read back; the manifest is there
//
// Those of outflow archive restore and rows, and of outflow replay:
//
//	rows.written                    rows are put back, and committed
//	replay.published                a message of a replay is in the target
//	restore.made, .message          the stream is made; a message of it is acknowledged
//	restore.published, .purged      all are; those that held the place of missing ones are gone
//
// Those of outflow stream apply:
//
//	stream.verified, .checked       the archive has what is to go; all was looked at again
//	stream.purged                   it is gone
//
// Those of outflow erase:
//
//	erase.begun, .notified          the request is noted; its last event is written
//	erase.rows, .detached           rows are deleted; those of a detached partition
//	erase.deleted, .cut             all are; the cut is noted
//	erase.confirmed                 every slot has confirmed it
//	erase.saved, .noted, .message   messages are noted with the request; with the stream; one is erased
//	erase.messages, .copy, .copies  all are; one of a copy is; all are
//	erase.parked                    what a consumer had parked is erased
//	erase.object, .manifest         a segment is written anew; its manifest counts
//	erase.replaced, .archived       an object of before is overwritten; all are
//	erase.finished                  the certificate is stored
package failpoint

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Env is the name of the environment variable.
const Env = "OUTFLOW_FAILPOINT"

// Faults that are no kills.
const (
	SpillFull = "spill.full"
	Clock     = "clock"
)

var points = []string{
	"memory.before", "memory.after", "start.before", "start.after", "publisher.before", "publisher.after",
	"publish.before", "publish.after",
	"flush.before", "flush.after", "ack", "record.before", "record.after",
	"confirm.before", "confirm.after", "tick.before", "tick.after", "change.before", "change.after",
	"spill.before", "spill.after",
}

var steps = []string{
	"uninstall.function", "uninstall.slot", "uninstall.publication", "uninstall.stream", "uninstall.record",
	"uninstall.bucket",
	"snapshot.begin", "snapshot.begun", "snapshot.known", "snapshot.slot", "snapshot.made", "snapshot.taken",
	"snapshot.row", "snapshot.published", "snapshot.durable", "snapshot.finished",
	"partition.made", "partition.attached", "partition.detaching", "partition.detached", "partition.sealing",
	"partition.sealed", "partition.durable", "partition.archived", "partition.compared", "partition.verified",
	"partition.dropping", "partition.dropped", "partition.deleted",
	"archive.message", "archive.begin", "archive.written", "archive.verified", "archive.manifest",
	"rows.written", "replay.published",
	"restore.made", "restore.message", "restore.published", "restore.purged",
	"stream.verified", "stream.checked", "stream.purged",
	"erase.begun", "erase.notified", "erase.rows", "erase.detached", "erase.deleted", "erase.cut",
	"erase.confirmed", "erase.saved", "erase.noted", "erase.message", "erase.messages", "erase.copy",
	"erase.copies", "erase.parked", "erase.object", "erase.manifest", "erase.replaced", "erase.archived",
	"erase.finished",
}

// Names returns the points at which outflow run can kill itself.
func Names() []string { return slices.Clone(points) }

func known(name string) bool { return slices.Contains(points, name) || slices.Contains(steps, name) }

// Set is what was armed. A nil one is nothing.
type Set struct {
	counts map[string]*count
	full   *full
	clock  time.Duration
	die    func()
	sleep  func()
}

// count counts how often a point was come to. It may be used by several goroutines.
type count struct {
	at    int64
	sleep bool // and not die
	seen  atomic.Int64
}

// FromEnviron reads the variable from an environment (as of os.Environ); nil if it is not there. A value that
// can't be used is a fault of class Usage that lists the points.
func FromEnviron(environ []string) (*Set, error) {
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, Env+"="); ok && value != "" {
			return Parse(value)
		}
	}
	return nil, nil
}

// Sets reports whether an entry of an environment sets the variable.
func Sets(entry string) bool { return strings.HasPrefix(entry, Env+"=") }

// Parse reads a value of the variable.
func Parse(value string) (*Set, error) {
	s := &Set{counts: map[string]*count{}, die: die, sleep: sleep}
	for item := range strings.SplitSeq(value, ",") {
		if err := s.add(strings.TrimSpace(item)); err != nil {
			return nil, &outbox.Fault{
				Class: outbox.Usage, Code: "failpoint", Message: fmt.Sprintf("%s=%q: %q %v", Env, value, item,
					err),
				Hint: fmt.Sprintf("It is for tests of outflow alone: unset it, or give a list of point:n "+
					"or stop.point:n with points %s %s, of %s:n or "+
					"%s:n+k, and of %s:duration", strings.Join(points, " "), strings.Join(steps, " "),
					SpillFull, SpillFull, Clock),
			}
		}
	}
	return s, nil
}

func (s *Set) add(item string) (err error) {
	name, text, _ := strings.Cut(item, ":")
	name, sleep := strings.CutPrefix(name, "stop.")
	switch {
	case sleep && !known(name):
		return fmt.Errorf("names no point")
	case name == SpillFull && s.full == nil:
		s.full, err = parseFull(text)
	case name == Clock && s.clock == 0:
		if s.clock, err = time.ParseDuration(text); err != nil || s.clock == 0 {
			return fmt.Errorf("has no duration such as 1h or -30m")
		}
	case name == SpillFull || name == Clock || s.counts[name] != nil:
		return fmt.Errorf("comes twice")
	case known(name):
		c := &count{sleep: sleep}
		if c.at, err = number(text); err == nil {
			s.counts[name] = c
		}
	default:
		return fmt.Errorf("names no point")
	}
	return err
}

func number(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("has no number from 1 on")
	}
	return n, nil
}

// Hit says that the process is at a point.
func (s *Set) Hit(point string) {
	if s != nil {
		s.hit(point)
	}
}

func (s *Set) hit(point string) {
	c := s.counts[point]
	if c == nil || c.seen.Add(1) != c.at {
		return
	}
	if c.sleep {
		s.sleep()
		return
	}
	s.die()
}

// around calls do between a point's before and after; after comes only where it succeeds.
func (s *Set) around(point string, do func() error) error {
	s.hit(point + ".before")
	err := do()
	if err == nil {
		s.hit(point + ".after")
	}
	return err
}

// sleep stops the process as kill -STOP does, and returns when it goes on. Until the signal has reached the
// other threads this one would go on to the next step, such as one that holds a lock.
func sleep() {
	woken := make(chan os.Signal, 1)
	signal.Notify(woken, syscall.SIGCONT)
	defer signal.Stop(woken)
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP)
	<-woken
}

// die ends the process as kill -9 does.
func die() {
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {} // the signal is on its way to the other threads
}
