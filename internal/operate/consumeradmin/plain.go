package consumeradmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// metadataRewind is on the durable that is the record of a rewind.
const metadataRewind = "outflow.rewind"

// record describes a durable before it is deleted and made again.
type record struct {
	Config jetstream.ConsumerConfig `json:"config"`
	Was    uint64                   `json:"was"`   // the newest message delivered
	Acked  uint64                   `json:"acked"` // everything up to here is acknowledged
	To     uint64                   `json:"to"`    // the rewind's
}

// recordOf describes a durable as it is.
func recordOf(info *jetstream.ConsumerInfo) *record {
	config := info.Config
	config.Metadata = map[string]string{}
	for k, v := range info.Config.Metadata {
		if !strings.HasPrefix(k, "_nats.") { // the server's own
			config.Metadata[k] = v
		}
	}
	return &record{Config: config, Was: max(info.AckFloor.Stream, info.Delivered.Stream),
		Acked: info.AckFloor.Stream}
}

func recordName(name string) string { return name + "_rewinding" }

// quiet is how long a durable must have been unused: a client that handles messages between two pulls has no
// request waiting.
const unusedFor = 5 * time.Second

// rewindPlain replaces a durable by one that begins after another sequence. The order of the steps preserves
// its description at any moment: write the record, delete the durable, make the new one, delete the record.
func (a *Admin) rewindPlain(ctx context.Context, stream jetstream.Stream, r Rewind) (err error) {
	var info *jetstream.ConsumerInfo // nil: there is none, because an earlier rewind was killed
	var rec *record
	var anew bool // an earlier one was killed after making the new durable, which is unused: the record holds
	plan := func() (*Plan, error) {
		if rec, err = a.record(ctx, stream, r.Name); err != nil {
			return nil, err
		}
		info, err = awaitUnused(ctx, r.Name, func() (*jetstream.ConsumerInfo, error) {
			c, err := stream.Consumer(ctx, r.Name)
			if err != nil {
				return nil, fmt.Errorf("consumer %s: %w", r.Name, err)
			}
			return c.CachedInfo(), nil
		})
		switch missing := errors.Is(err, jetstream.ErrConsumerNotFound); {
		case missing && rec == nil:
			return nil, fatal("consumer_missing", fmt.Sprintf("stream %s has no consumer %s", a.Stream,
				r.Name), "`outflow consumer list` names those that there are")
		case err != nil && !missing:
			return nil, err
		}
		anew = info != nil && rec != nil && info.Config.OptStartSeq == rec.To+1 &&
			info.Delivered.Consumer == 0
		if info != nil && !anew {
			rec = recordOf(info)
		}
		to, err := a.resolve(ctx, stream, r.Name, r.target)
		if err != nil {
			return nil, err
		}
		if to < rec.Was {
			to = min(to, rec.Acked) // what was delivered but not acknowledged is not done
		}
		p, err := a.plan(ctx, stream, r.Name, Plain, rec.Was, to, filtersOf(&rec.Config))
		if err == nil {
			p.Exact = true
		}
		return p, err
	}
	p, err := plan()
	if err != nil {
		return err
	}
	if yes, err := r.asked(p, plan); !yes {
		return err
	}
	to := p.To
	if anew && rec.To == to {
		return a.deleteRecord(ctx, stream, r.Name)
	}
	if rec.To = to; info != nil {
		if err := a.writeRecord(ctx, stream, rec); err != nil {
			return err
		}
		if err := stream.DeleteConsumer(ctx, r.Name); err != nil &&
			!errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("delete consumer %s: %w", r.Name, err)
		}
	}
	config := rec.Config
	config.DeliverPolicy, config.OptStartSeq, config.OptStartTime =
		jetstream.DeliverByStartSequencePolicy, to+1, nil
	if _, err := stream.CreateConsumer(ctx, config); err != nil {
		return fmt.Errorf("make consumer %s again (it was deleted; its record is consumer %s, and the same "+
			"command goes on): %w", r.Name, recordName(r.Name), err)
	}
	return a.deleteRecord(ctx, stream, r.Name)
}

func (a *Admin) deleteRecord(ctx context.Context, stream jetstream.Stream, name string) error {
	if err := stream.DeleteConsumer(ctx, recordName(name)); err != nil &&
		!errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("delete the record %s: %w", recordName(name), err)
	}
	return nil
}

// record reads the record of an interrupted rewind; nil if there is none.
func (a *Admin) record(ctx context.Context, stream jetstream.Stream, name string) (*record, error) {
	c, err := stream.Consumer(ctx, recordName(name))
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("consumer %s: %w", recordName(name), err)
	}
	rec := &record{}
	text, ok := c.CachedInfo().Config.Metadata[metadataRewind]
	if !ok {
		return nil, fatal("rewind_record", fmt.Sprintf("consumer %s is in the way: a rewind of %s would "+
			"use the name", recordName(name), name), "Rename it")
	}
	if err := json.Unmarshal([]byte(text), rec); err != nil {
		return nil, fmt.Errorf("consumer %s: metadata %s: %w", recordName(name), metadataRewind, err)
	}
	return rec, nil
}

// writeRecord makes the record: a durable that nobody reads, at the position of the other one.
func (a *Admin) writeRecord(ctx context.Context, stream jetstream.Stream, rec *record) error {
	text, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	name := recordName(rec.Config.Durable)
	if err := stream.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return fmt.Errorf("delete the record %s: %w", name, err)
	}
	_, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		Durable: name, AckPolicy: jetstream.AckExplicitPolicy,
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: rec.Was + 1,
		FilterSubject: rec.Config.FilterSubject, FilterSubjects: rec.Config.FilterSubjects,
		Replicas:    rec.Config.Replicas,
		Description: "what " + rec.Config.Durable + " was before outflow set it back",
		Metadata:    map[string]string{metadataRewind: string(text)},
	})
	if err != nil {
		return fmt.Errorf("make the record %s: %w", name, err)
	}
	return nil
}

// awaitUnused waits until the durable has been unused for a while, and returns an error if it is in use.
func awaitUnused(ctx context.Context, name string, look func() (*jetstream.ConsumerInfo, error)) (
	*jetstream.ConsumerInfo, error) {
	var last *jetstream.ConsumerInfo
	var since time.Time // when the first answer came
	for {
		asked := time.Now()
		info, err := look()
		if err != nil {
			return nil, err
		}
		if err := refuseInUse(name, info); err != nil {
			return nil, err
		}
		if last != nil && (info.Delivered.Consumer != last.Delivered.Consumer ||
			info.AckFloor.Consumer != last.AckFloor.Consumer || info.NumAckPending != last.NumAckPending) {
			return nil, runningFault(name, "it was used while it was looked at")
		}
		if last == nil {
			since = time.Now()
		}
		// Count from an answer to a later request: the delay of an answer says nothing about the durable.
		if last = info; asked.Sub(since) >= unusedFor || unused(info) {
			return info, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// unused reports whether, according to the server, nobody has used the durable for a while.
func unused(info *jetstream.ConsumerInfo) bool {
	now := info.TimeStamp
	long := func(t *time.Time) bool { return t == nil || now.Sub(*t) >= unusedFor }
	return !now.IsZero() && long(info.Delivered.Last) && long(info.AckFloor.Last) && info.NumAckPending == 0
}
