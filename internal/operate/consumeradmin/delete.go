package consumeradmin

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/units"
)

// Delete says which consumer is deleted.
type Delete struct {
	Name   string
	Force  bool // also what it has parked
	DryRun bool // only Confirm is called

	// Confirm is called with the plan; nothing is changed if it returns an error.
	Confirm func(p *Deletion) error
}

// Deletion is what a deletion removes. The JSON names are stable.
type Deletion struct {
	Name            string `json:"name"`
	Offsets         string `json:"marks"`
	Partitions      int    `json:"partitions"` // marks
	Sequence        uint64 `json:"sequence"`   // everything up to here was done
	Parked          int    `json:"parked"`     // events, whose effects never happen then
	ParkedDocuments int    `json:"parked_documents"`
	Durable         bool   `json:"durable"`  // there is a durable of its name in JetStream
	Replayed        uint64 `json:"replayed"` // messages that were replayed to it, read or not
}

// Lines is the plan in words.
func (p *Deletion) Lines() []string {
	lines := []string{fmt.Sprintf("consumer %s is deleted (marks: %s)", p.Name, p.Offsets)}
	if p.Partitions > 0 {
		lines = append(lines, fmt.Sprintf("marks    of %s: all is done up to sequence %d",
			units.Of(p.Partitions, "partition"), p.Sequence))
	}
	if p.Parked > 0 {
		lines = append(lines, fmt.Sprintf("parked   %s of %s, whose effects never happen",
			units.Of(p.Parked, "event"), units.Of(p.ParkedDocuments, "document")))
	}
	if p.Replayed > 0 {
		lines = append(lines, fmt.Sprintf("replays  %s replayed to it", units.Of(p.Replayed, "message")))
	}
	if p.Durable {
		lines = append(lines, "durable  "+p.Name)
	}
	return append(lines, "again    a consumer of this name begins anew, where its program says")
}

// Delete removes what there is of a consumer: first from NATS, then from its database, so that a deletion
// that was killed can be run again. Its effects stay.
func (a *Admin) Delete(ctx context.Context, r Delete) error {
	stream, err := a.stream(ctx)
	if err != nil {
		return err
	}
	info, kind, err := a.find(ctx, r.Name)
	if err != nil {
		return err
	}
	p := &Deletion{Name: r.Name, Offsets: kind, Durable: info != nil}
	kv, err := openBucket(ctx, a.JS, a.Stream)
	if err != nil {
		return err
	}
	var s *state
	switch kind {
	case InPostgres:
		if s, err = a.inDatabase(ctx, a.DB, r.Name, free); err == nil {
			err = refuseAlive(r.Name, hintStop, s)
		}
		if err == nil {
			p.Parked, p.ParkedDocuments, err = a.database().parked(ctx, a.DB, r.Name)
		}
	case InJetStream:
		var doc *document
		if doc, err = a.idleDocument(ctx, kv, r.Name); err == nil {
			s = &doc.state
		}
	}
	if err == nil {
		err = refuseInUse(r.Name, info)
	}
	if err == nil {
		p.Replayed, err = a.replayed(ctx, r.Name)
	}
	if err != nil {
		return err
	}
	if s != nil {
		p.Partitions, p.Sequence = len(s.offsets), s.lowest().Seq
	}
	if err := r.refuseParked(p.Parked); err != nil {
		return err
	}
	if err := r.Confirm(p); err != nil || r.DryRun {
		return err
	}
	if kind != InPostgres {
		return a.removeFromNATS(ctx, stream, kv, r.Name)
	}
	return a.database().change(ctx, r.Name, func(tx pgx.Tx) error {
		now, err := a.inDatabase(ctx, tx, r.Name, moves) // from here on nobody claims, moves or parks
		if err == nil {
			err = refuseAlive(r.Name, hintStop, now)
		}
		if err == nil {
			var parked int
			if parked, _, err = a.database().parked(ctx, tx, r.Name); err == nil {
				err = r.refuseParked(parked)
			}
		}
		if err == nil {
			err = a.removeFromNATS(ctx, stream, kv, r.Name)
		}
		if err == nil {
			err = a.database().remove(ctx, tx, r.Name)
		}
		return err
	})
}

func (r *Delete) refuseParked(events int) error {
	if events == 0 || r.Force {
		return nil
	}
	return fatal("consumer_parked", fmt.Sprintf("consumer %s has %s parked, whose effects would never "+
		"happen", r.Name, units.Of(events, "event")), fmt.Sprintf("Look at them with "+
		"`outflow parked list %s`, and release them; or delete them with the consumer: --force", r.Name))
}

// replayedFilter matches what was replayed to a consumer.
func (a *Admin) replayedFilter(name string) (stream, filter string) {
	return a.Stream + "_replay", "_outflow_replay." + a.Stream + "." + name + ".>"
}

// replayed counts the messages that were replayed to a consumer and are still there.
func (a *Admin) replayed(ctx context.Context, name string) (n uint64, err error) {
	replay, filter := a.replayedFilter(name)
	stream, err := a.JS.Stream(ctx, replay)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil
	}
	var info *jetstream.StreamInfo
	if err == nil {
		info, err = stream.Info(ctx, jetstream.WithSubjectFilter(filter))
	}
	if err != nil {
		return 0, fmt.Errorf("stream %s: %w", replay, err)
	}
	for _, count := range info.State.Subjects {
		n += count
	}
	return n, nil
}

// removeFromNATS removes what NATS has of a consumer. What is not there any more is not an error.
func (a *Admin) removeFromNATS(ctx context.Context, stream jetstream.Stream, kv *bucket, name string) error {
	for _, durable := range []string{name, recordName(name)} {
		if err := stream.DeleteConsumer(ctx, durable); err != nil &&
			!errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("delete durable %s: %w", durable, err)
		}
	}
	if n, err := a.replayed(ctx, name); err != nil {
		return err
	} else if n > 0 {
		replay, filter := a.replayedFilter(name)
		at, err := a.JS.Stream(ctx, replay)
		if err == nil {
			err = at.Purge(ctx, jetstream.WithPurgeSubject(filter))
		}
		if err != nil {
			return fmt.Errorf("purge %s of stream %s: %w", filter, replay, err)
		}
	}
	if doc, err := kv.load(ctx, name); err != nil || doc == nil {
		return err
	}
	if err := kv.kv.Purge(ctx, name); err != nil {
		return fmt.Errorf("key %s of bucket %s: %w", name, kv.kv.Bucket(), err)
	}
	return nil
}
