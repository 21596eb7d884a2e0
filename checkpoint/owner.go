package checkpoint

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxCuts is how many cuts a record may list. They go with the checkpoints that they are above.
const maxCuts = 256

// TakenBy returns the record in which a cluster has taken the next epoch. Whoever had the one before finds
// out when it saves the record.
func (r *Record) TakenBy(cluster int) *Record {
	c := *r
	c.Owner, c.Epoch = cluster, r.Epoch+1
	return &c
}

// WithCut returns the record with a cut that is a durable message of the stream, and the newest one. One that
// the record has already changes nothing. A cut of another home (cut_home), below the one before it or below
// a checkpoint (cut_order) contradicts the record: a gap fault.
func (c Config) WithCut(r *Record, at relay.Stored) (*Record, error) {
	refuse := func(code, message string) (*Record, error) {
		newest := r.Checkpoints[len(r.Checkpoints)-1]
		return nil, &outbox.Fault{Class: outbox.Gap, Code: code, Message: message,
			Hint: c.hintOf(code, hintCut), From: min(newest.Published(), at.Cut.LSN),
			To: max(newest.Due, at.Cut.LSN)}
	}
	what := fmt.Sprintf("sequence %d of stream %s is a cut at %v", at.Seq, c.Stream, at.Cut.LSN)
	switch n := len(r.Cuts); {
	case !at.Cut.Of(r.SystemID):
		return refuse(codeCutHome, c.cutOfAnotherHome(at.Seq, at.Cut, r.SystemID))
	case n > 0 && r.Cuts[n-1] == at.Cut.LSN:
		return r, nil
	case n > 0 && r.Cuts[n-1] > at.Cut.LSN:
		return refuse(codeCutOrder, fmt.Sprintf("%s, and the record has one at %v", what, r.Cuts[n-1]))
	case r.Checkpoints[len(r.Checkpoints)-1].Due > at.Cut.LSN:
		return refuse(codeCutOrder, fmt.Sprintf("%s, and the record has a checkpoint at %v", what,
			r.Checkpoints[len(r.Checkpoints)-1].Due))
	case at.Cut.Epoch > r.Epoch:
		return refuse(codeCutOrder, fmt.Sprintf("%s in epoch %d, and the record has epoch %d", what,
			at.Cut.Epoch, r.Epoch))
	}
	next := *r
	next.Cuts = append(slices.Clone(r.Cuts), at.Cut.LSN)
	return &next, nil
}

// cutsFrom returns the cuts that a start from one of the checkpoints may come by. One at the due of a
// checkpoint may be still to come there: in gap mode, where a checkpoint holds events at or below its due.
func cutsFrom(cuts []outbox.LSN, checkpoints []StoredCheckpoint) []outbox.LSN {
	if len(checkpoints) == 0 {
		return cuts
	}
	n, _ := slices.BinarySearch(cuts, checkpoints[0].Due)
	if n == len(cuts) {
		return nil
	}
	return cuts[n:]
}

// validateOwner looks at what only the record of a stream that clusters share has.
func (r *Record) validateOwner() error {
	switch {
	case r.Epoch == 0 && (r.Owner != 0 || len(r.Cuts) > 0):
		return errors.New("an owner or a cut without an epoch")
	case r.Epoch == 0:
		return nil
	case r.Version < sharedVersion || r.Mapping.Control == "":
		return fmt.Errorf("epoch %d in version %d, with control table %q", r.Epoch, r.Version,
			r.Mapping.Control)
	case r.Owner < 1 || r.Owner > outbox.MaxCluster:
		return fmt.Errorf("owner %d", r.Owner)
	case len(r.Cuts) > maxCuts:
		return fmt.Errorf("%d cuts, at most %d", len(r.Cuts), maxCuts)
	}
	for i, cut := range r.Cuts {
		if cut == 0 || i > 0 && cut <= r.Cuts[i-1] {
			return fmt.Errorf("cut at %v is out of order", cut)
		}
	}
	if n := len(r.Cuts); n > 0 && n > len(cutsFrom(r.Cuts, r.Checkpoints)) {
		return fmt.Errorf("cut at %v is below the first place, at %v", r.Cuts[0], r.Checkpoints[0].Due)
	}
	return nil
}
