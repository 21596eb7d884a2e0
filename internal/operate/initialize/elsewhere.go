package initialize

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/parts"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// Where the stream is another cluster's, init makes slot, publication and the record of what this cluster
// keeps of the home's rows. Stream, bucket and the stream's record are the home's, and have to be there.

// homeStream checks that they are.
func (s *setup) homeStream(ctx context.Context) error {
	err := wiring.CheckShared(ctx, s.cfg, s.conn)
	if err == nil {
		err = s.stream(ctx)
	}
	if err == nil {
		err = s.store.CheckAlone(ctx)
	}
	if err != nil {
		return s.fits(err, parts.Stream, s.cfg.Stream)
	}
	s.reportState("there, the home's", parts.Stream, s.cfg.Stream)
	return nil
}

// ofHome leaves of the stream's state what concerns whoever does not make it.
func ofHome(st relay.StreamState) relay.StreamState {
	return relay.StreamState{Exists: st.Exists, Created: st.Created, Replicated: st.Replicated, Now: st.Now}
}

// The subscription's worker receives something at once, unless it or the home does not run.
const (
	receivePoll     = 100 * time.Millisecond
	receivePatience = 20 * time.Second
)

// received is up to where the home's rows may have come before the slot was made: of the home's checkpoints
// this cluster can go on with those at or above it.
func (s *setup) received(ctx context.Context) (outbox.LSN, error) {
	done := progress.Wait(ctx, "waiting for subscription "+s.cfg.Cluster.Subscription)
	defer done()
	for begun := time.Now(); ; {
		lsn, ok, err := s.pg.Received(ctx)
		if err != nil || ok {
			return lsn, err
		}
		if time.Since(begun) > receivePatience {
			return 0, &outbox.Fault{
				Class: outbox.Fatal, Code: "subscription",
				Message: fmt.Sprintf("subscription %q has received nothing for %v: up to where the home's "+
					"rows have come is not known", s.cfg.Cluster.Subscription, receivePatience),
				Hint: "Is it enabled, and does the home's server run? Then run `outflow init` again",
			}
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(receivePoll):
		}
	}
}

// firstPlace is where the record begins. Before a subscription's own stream there is nothing.
func (s *setup) firstPlace(ctx context.Context, start outbox.LSN) (due, read outbox.LSN, err error) {
	switch {
	case s.cfg.Cluster.Elsewhere():
		due, err = s.received(ctx)
		return due, start, err
	case s.layout.Mapping.Away(): // all that the slot brings of the home comes behind
		return 1, start, nil
	}
	return start, 0, nil
}

// share gives the record of a shared stream its first owner: the home.
func (s *setup) share(rec *checkpoint.Record) {
	if s.cfg.Cluster.Shared() && !s.cfg.Cluster.Elsewhere() {
		rec.Owner, rec.Epoch = s.cfg.Cluster.ID, max(rec.Epoch, 1)
	}
}

// unshared reports whether clusters are to share the stream of a record that has no owner yet.
func (s *setup) unshared(rec *checkpoint.Record) bool {
	return s.cfg.Cluster.Shared() && !s.cfg.Cluster.Elsewhere() && rec.Epoch == 0
}

// otherCluster refuses a record of clusters that publish for one another, where this is to be none of them or
// another one, and one of clusters of another kind, where this is to be one: what they have said stays with
// the others.
func (s *setup) otherCluster(rec *checkpoint.Record) error {
	old, new := rec.Mapping, s.layout.Mapping
	if old.Cluster == new.Cluster || old.Cluster == 0 && rec.Epoch == 0 && !old.Away() {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: checkpoint.CodeMode,
		Message: fmt.Sprintf("the checkpoint record of slot %s is %s, the configuration is %s: that can't "+
			"be changed", s.cfg.Slot, islandText(rec), islandText(&checkpoint.Record{Mapping: new})),
		Hint: "Set cluster.mode and cluster.id to what they were. To change them, run `outflow uninstall` " +
			"for each slot on each cluster, then `outflow init`",
	}
}

// islandText says what a record is of, as far as cluster.mode decides that.
func islandText(rec *checkpoint.Record) string {
	switch {
	case rec.Mapping.Cluster != 0:
		return fmt.Sprintf("of cluster %d, with which others publish for one another", rec.Mapping.Cluster)
	case rec.Epoch > 0:
		return "of a stream that clusters share"
	}
	return "of a cluster for which no other one publishes"
}
