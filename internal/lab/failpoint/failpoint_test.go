package failpoint

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/tempfile"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/pipeline"
)

// world is what a pipeline could be connected to. Its log says what was called.
type world struct {
	pipeline.Source
	pipeline.JetStream
	pipeline.Publisher
	log    []string
	fail   error
	acked  uint64
	sent   uint64
	record *checkpoint.Record
}

func (w *world) did(what string) { w.log = append(w.log, what) }

func (w *world) Start(context.Context, outbox.LSN, bool) error { w.did("start"); return w.fail }
func (w *world) Confirm(outbox.LSN)                            { w.did("confirm") }
func (w *world) Close()                                        {}
func (w *world) Err() error                                    { return nil }
func (w *world) Check(context.Context) error                   { return nil }
func (w *world) Heartbeat(context.Context) error               { w.did("tick"); return w.fail }
func (w *world) Change(context.Context, relay.Settings) error  { w.did("change"); return w.fail }

func (w *world) ClusterRow(context.Context, relay.ClusterRow, time.Time) error {
	w.did("cluster row")
	return w.fail
}
func (w *world) Watermark(context.Context, relay.Watermark) error { w.did("watermark"); return w.fail }

type side struct{ *world }

func (s side) Publisher(uint64, uint64, uint64) pipeline.Publisher {
	s.did("publisher")
	return line(s)
}

type line struct{ *world }

func (l line) Publish(*relay.Event, *outbox.Header) error { l.did("publish"); l.sent++; return l.fail }
func (l line) Flush(time.Time) time.Duration              { l.did("flush"); return 0 }
func (l line) Acked() uint64                              { return l.acked }
func (l line) Sent() uint64                               { return l.sent }
func (l line) Check(time.Time) error                      { return nil }
func (w *world) Load(context.Context) (*checkpoint.Record, uint64, error) {
	return w.record, 1, w.fail
}

func (w *world) SaveGaps(context.Context, []byte) error { return nil }

func (w *world) Save(_ context.Context, r *checkpoint.Record, _ uint64) (uint64, error) {
	w.did("record")
	w.record = r
	return 2, w.fail
}

func (s side) Recent(context.Context, uint64, uint64, int) ([]outbox.Counter, error) {
	s.did("memory")
	return nil, s.fail
}

// decorated returns a world behind the points of a value; dying is written to its log.
func decorated(t *testing.T, value string) (*world, *pipeline.Config, *pipeline.Conns) {
	t.Helper()
	s, err := Parse(value)
	must.Succeed(t, err)
	w := &world{}
	s.die = func() { w.did("dies") }
	c := &pipeline.Config{
		Scratch: tempfile.Dir(t.TempDir()),
		Open: func(context.Context) (*pipeline.Conns, error) {
			return &pipeline.Conns{Source: w, JetStream: side{w}, Store: w, Writer: w}, nil
		},
	}
	s.Decorate(c)
	l, err := c.Open(t.Context())
	must.Succeed(t, err)
	return w, c, l
}

func TestEveryPointIsCounted(t *testing.T) {
	t.Parallel()
	for _, point := range Names() {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			name, _, _ := strings.Cut(point, ".")
			second := ":2"
			if name == "publisher" { // the one that all of them have is the first
				second = ":3"
			}
			w, c, l := decorated(t, point+second)
			p := l.JetStream.Publisher(0, 0, 0)
			call := map[string]func() error{
				"memory": func() error {
					_, err := l.JetStream.Recent(t.Context(), 0, 0, 1)
					return err
				},
				"start":     func() error { return l.Source.Start(t.Context(), 1, true) },
				"publisher": func() error { l.JetStream.Publisher(0, 0, 0); return nil },
				"publish":   func() error { return p.Publish(nil, nil) },
				"flush": func() error {
					w.sent++
					p.Flush(time.Time{})
					p.Flush(time.Time{})
					return nil
				},
				"ack": func() error { w.acked++; w.did("ack"); p.Acked(); p.Acked(); return nil },
				"record": func() error {
					_, err := l.Store.Save(t.Context(), &checkpoint.Record{}, 1)
					return err
				},
				"confirm": func() error {
					lsn := outbox.LSN(len(w.log) + 1)
					l.Source.Confirm(lsn)
					l.Source.Confirm(lsn)
					return nil
				},
				"tick":   func() error { return l.Writer.Heartbeat(t.Context()) },
				"change": func() error { return l.Writer.Change(t.Context(), relay.Settings{}) },
				"spill": func() error {
					w.did("spill")
					f, err := c.Scratch.Create()
					if err != nil {
						return err
					}
					defer f.Close()
					for range 2 {
						if _, err := f.Write([]byte("run")); err != nil {
							return err
						}
					}
					return nil
				},
			}
			died := func() int { return slices.Index(w.log, "dies") }
			do := call[name]
			if name == "snapshot" {
				do = func() error { l.Source.(*source).set.Hit(point); return nil }
			}
			if err := do(); err != nil || died() >= 0 {
				t.Fatalf("after the first time: %v, %v", w.log, err)
			}
			before := len(w.log)
			if err := do(); err != nil || died() < before {
				t.Fatalf("after the second time: %v, %v", w.log, err)
			}
			after := strings.HasSuffix(point, ".after") || name == "ack" || name == "spill"
			if (died() > before) != after {
				t.Errorf("it died at %d of %v", died()-before, w.log)
			}
			if err := do(); err != nil || slices.Index(w.log[died()+1:], "dies") >= 0 {
				t.Errorf("it dies again: %v, %v", w.log, err)
			}
		})
	}
}

func TestAFailpointStopsWhereItIsTold(t *testing.T) {
	t.Parallel()
	w, _, l := decorated(t, "stop.snapshot.row:2")
	set := l.Source.(*source).set
	set.sleep = func() { w.did("sleeps") }
	for range 4 {
		set.Hit("snapshot.row")
	}
	(*Set)(nil).Hit("snapshot.row")
	if !slices.Equal(w.log, []string{"sleeps"}) {
		t.Error(w.log)
	}
}

func TestAfterIsAfterSuccess(t *testing.T) {
	t.Parallel()
	w, _, l := decorated(t, "start.after:1,record.after:1,publish.after:1")
	w.fail = errors.New("refused")
	if err := l.Source.Start(t.Context(), 1, true); err != w.fail {
		t.Error(err)
	}
	if _, err := l.Store.Save(t.Context(), &checkpoint.Record{}, 1); err != w.fail {
		t.Error(err)
	}
	if err := l.JetStream.Publisher(0, 0, 0).Publish(nil, nil); err != w.fail {
		t.Error(err)
	}
	if slices.Contains(w.log, "dies") {
		t.Error(w.log)
	}
}

func TestAFullDiskFailsTheWritesItIsTold(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{"spill.full:3": "..xxxxx", "spill.full:2+3": ".xxx...",
		"spill.full:1+1": "x......"} {
		_, c, _ := decorated(t, value)
		var got strings.Builder
		for range want { // a file each: the disk is counted, not the file
			f, err := c.Scratch.Create()
			must.Succeed(t, err)
			switch _, err = f.Write([]byte("run")); {
			case err == nil:
				got.WriteByte('.')
			case errors.Is(err, syscall.ENOSPC):
				got.WriteByte('x')
			default:
				t.Fatal(err)
			}
			must.Succeed(t, f.Close())
		}
		if got.String() != want {
			t.Errorf("%s: %s, want %s", value, got.String(), want)
		}
	}
}

// A clock that is ahead sees what others stored as older, and what it stores itself as it is.
func TestAClockThatIsAheadSeesOldThingsOlder(t *testing.T) {
	t.Parallel()
	w, _, l := decorated(t, "clock:2h")
	now := time.Now()
	w.record = &checkpoint.Record{Checkpoints: []checkpoint.StoredCheckpoint{{Since: now}}}
	others := w.record
	r, _, err := l.Store.Load(t.Context())
	if err != nil || !r.Checkpoints[0].Since.Equal(now.Add(-2*time.Hour)) {
		t.Fatalf("%v, %v", r, err)
	}
	r.Checkpoints = append(r.Checkpoints, checkpoint.StoredCheckpoint{Since: now})
	if _, err := l.Store.Save(t.Context(), r, 1); err != nil {
		t.Fatal(err)
	}
	if got := w.record.Checkpoints; !got[0].Since.Equal(now) || !got[1].Since.Equal(now.Add(2*time.Hour)) {
		t.Errorf("stored: %v", got)
	}
	if !others.Checkpoints[0].Since.Equal(now) || !r.Checkpoints[1].Since.Equal(now) {
		t.Error("the caller's record was changed")
	}
}

func TestAFailpointIsParsedOrRefused(t *testing.T) {
	t.Parallel()
	for _, value := range []string{
		"publish", "stop.ack", "stop.clock:1h", "stop.nowhere:1", "stop.ack:1,ack:1", "publish.after",
		"publish.after:", "publish.after:0", "publish.after:-1", "publish.after:x", "nowhere:1", "ack:1,",
		"ack:1,ack:2",
		"spill.full:", "spill.full:1+", "spill.full:1+0", "spill.full:1,spill.full:2", "clock:", "clock:5",
		"clock:0s", "clock:1h,clock:2h", ",",
	} {
		_, err := FromEnviron([]string{"PATH=/", Env + "=" + value})
		if f := outbox.FaultOf(err); f == nil || f.Class != outbox.Usage {
			t.Errorf("%s: %v", value, err)
			continue
		}
		for _, point := range append(Names(), SpillFull, Clock) {
			if !strings.Contains(err.Error(), point) {
				t.Errorf("%s: the error does not name %s: %v", value, point, err)
			}
		}
	}
	s, err := FromEnviron([]string{Env + "=ack:1, clock:-1h,spill.full:2+3"})
	if err != nil || len(s.counts) != 1 || s.clock != -time.Hour || s.full.from != 2 || s.full.failures != 3 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestNothingIsWrappedWithoutIt(t *testing.T) {
	t.Parallel()
	s, err := FromEnviron([]string{"PATH=/", Env + "="})
	if s != nil || err != nil {
		t.Fatalf("%v, %v", s, err)
	}
	c := &pipeline.Config{Scratch: tempfile.Dir("")}
	s.Decorate(c)
	if _, ok := c.Scratch.(tempfile.Dir); !ok || c.Open != nil {
		t.Errorf("%+v", c)
	}
}
