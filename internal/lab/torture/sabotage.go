package torture

import (
	"context"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/outflowhq/outflow/outbox"
)

// sabotages are what the harness can do to itself, so that a test sees that it notices.
var sabotages = []string{"", "duplicate", "drop", "swap", "change", "abort"}

// sabotage spoils the end of a victim's stream, behind the back of an outflow that has stopped.
func sabotage(ctx context.Context, v *victim, how string) error {
	s, err := v.nats.js.Stream(ctx, v.stream)
	if err != nil {
		return err
	}
	last := s.CachedInfo().State.LastSeq
	take := func(seq uint64) (*nats.Msg, error) {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			return nil, err
		}
		// A direct get adds headers of its own.
		header := nats.Header{outbox.HeaderName: m.Header[outbox.HeaderName]}
		return &nats.Msg{Subject: m.Subject, Header: header, Data: m.Data}, s.SecureDeleteMsg(ctx, seq)
	}
	// The only way in is the stream's private one.
	subjects := s.CachedInfo().Config.Subjects
	if len(subjects) != 1 {
		return fmt.Errorf("stream %s has the subjects %q", v.stream, subjects)
	}
	ingress := subjects[0][:len(subjects[0])-1]
	put := func(m *nats.Msg) error {
		last++
		header := nats.Header{outbox.HeaderName: m.Header[outbox.HeaderName]}
		header.Set("Nats-Expected-Last-Sequence", strconv.FormatUint(last-1, 10))
		_, err := v.nats.js.PublishMsg(ctx, &nats.Msg{Subject: ingress + m.Subject, Header: header,
			Data: m.Data})
		return err
	}
	if how == "drop" {
		_, err := take(last / 2)
		return err
	}
	a, err := take(last - 1)
	if err != nil {
		return err
	}
	b, err := take(last)
	if err != nil {
		return err
	}
	switch how {
	case "duplicate":
		for _, m := range []*nats.Msg{a, b} {
			if err := put(m); err != nil {
				return err
			}
		}
		return put(b)
	case "swap":
		a, b = b, a
	case "change":
		b.Data = append(b.Data, ' ')
	case "abort":
		b.Header.Set(outbox.HeaderName, "v=1 lsn=0/1 i=0 n=0 of=1 due=0/1 thru=0/2 pull=0 tl=1 sort=s "+
			"id=00000000-0000-0000-0000-000000000000 key=x")
	}
	if err := put(a); err != nil {
		return err
	}
	return put(b)
}
