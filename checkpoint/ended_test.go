package checkpoint

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/outbox"
)

func TestTheLastEndIsKnownUntilTheRecordIsWritten(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	last := func(code string) *End {
		t.Helper()
		e, err := s.LastEnd(ctx)
		must.Succeed(t, err)
		if e == nil && code != "" || e != nil && e.Code != code {
			t.Fatalf("%+v, want code %q", e, code)
		}
		return e
	}
	end := func(f outbox.Fault) {
		t.Helper()
		f.Class = outbox.Gap
		must.Succeed(t, s.SaveEnd(ctx, NewEnd(&f)))
	}
	last("")
	if err := s.SaveEnd(ctx, End{}); err == nil {
		t.Error("stored without a bucket")
	}
	ensure(ctx, t, s)
	last("")
	end(outbox.Fault{Code: "stream_missing", Message: "m", Hint: "h", From: 1, To: 2})
	e := last("stream_missing")
	if e.Message != "m; LSN range 0/1 to 0/2" || e.Hint != "h" || e.Class != "gap" ||
		time.Since(e.At) > time.Hour {
		t.Errorf("%+v", e)
	}
	revision := save(ctx, t, s, record(at(0x1000, 0, 0)), 0)
	last("")
	end(outbox.Fault{Code: "slot_missing", Message: strings.Repeat("☃", 100_000)})
	if e := last("slot_missing"); len(e.Message) > maxEndText+3 {
		t.Errorf("%d bytes", len(e.Message))
	}
	// The record is what it was, and nobody takes the end for another slot's record.
	if r, now := load(ctx, t, s); r == nil || now != revision {
		t.Errorf("%v at %d", r, now)
	}
	must.Succeed(t, s.CheckAlone(ctx))
	other := NewStore(jsapi.New(nc, ""), StoreConfig{Stream: "OUTBOX", Slot: "other"})
	if e, err := other.LastEnd(ctx); e != nil || err != nil {
		t.Errorf("of another slot: %+v, %v", e, err)
	}
	save(ctx, t, s, record(at(0x2000, 3, 0)), revision)
	last("")
}

// TestWhatMaintainSaidIsRemovedByHand as the hint of maintain_absent says: nobody is to maintain any more.
func TestWhatMaintainSaidIsRemovedByHand(t *testing.T) {
	t.Parallel()
	ctx, nc, s := bucket(t)
	ensure(ctx, t, s)
	must.Succeed(t, s.SaveMaintained(ctx, []byte("{}")))
	if doc, _, err := s.Maintained(ctx); err != nil || string(doc) != "{}" {
		t.Fatalf("%q, %v", doc, err)
	}
	js, err := jetstream.New(nc)
	must.Succeed(t, err)
	kv, err := js.KeyValue(ctx, Bucket(s.cfg.Stream))
	must.Succeed(t, err)
	must.Succeed(t, kv.Delete(ctx, "maintained."+s.cfg.Slot)) // as nats kv del does
	if doc, _, err := s.Maintained(ctx); err != nil || doc != nil {
		t.Errorf("%q, %v", doc, err)
	}
}
