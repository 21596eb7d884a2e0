package checkpoint

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// StoredCut is a cut of the record.
type StoredCut struct {
	LSN outbox.LSN `json:"lsn"`
	Seq uint64     `json:"seq"` // of its message in the stream
}

func (c StoredCut) String() string { return fmt.Sprintf("%v at sequence %d", c.LSN, c.Seq) }

// maxCuts is how many cuts a record may list. They go with the checkpoints that they are above.
const maxCuts = 256

// TakenBy returns the record in which a cluster has taken the next epoch. Whoever had the one before finds
// out when it saves the record.
func (r *Record) TakenBy(cluster int) *Record {
	c := *r
	c.Owner, c.Epoch = cluster, r.Epoch+1
	return &c
}

// homeID is the system identifier of the stream's home; "" where nobody says it: the home's rows are read
// elsewhere, for another stream.
func (r *Record) homeID() string {
	switch {
	case r.home != nil:
		return r.home.SystemID
	case r.Mapping.Away():
		return ""
	}
	return r.SystemID
}

// CutAt returns the cut by which the record's owner closes what it holds, at the newest input that it has
// read; timeline is the home's as far as it is known.
func (r *Record) CutAt(lsn outbox.LSN, timeline uint32) (outbox.Cut, error) {
	id, err := strconv.ParseUint(r.homeID(), 10, 64)
	if err != nil {
		return outbox.Cut{}, fmt.Errorf("the home's system identifier: %w", err)
	}
	return outbox.Cut{SystemID: id, Timeline: timeline, LSN: lsn, Epoch: r.Epoch, Owner: r.Owner}, nil
}

// WithCut returns the record with a cut that is a durable message of the stream, and the newest one. One that
// the record has already changes nothing. A cut of another home (cut_home), or one that does not come behind
// the one before it and behind each checkpoint (cut_order), contradicts the record: a gap fault.
func (c Config) WithCut(r *Record, at relay.Stored) (*Record, error) {
	refuse := func(code, message string) (*Record, error) {
		newest := r.Checkpoints[len(r.Checkpoints)-1]
		return nil, &outbox.Fault{Class: outbox.Gap, Code: code, Message: message,
			Hint: c.hintOf(code, hintCut), From: min(newest.Published(), at.Cut.LSN),
			To: max(newest.Due, at.Cut.LSN)}
	}
	what := fmt.Sprintf("sequence %d of stream %s is a cut at %v", at.Seq, c.Stream, at.Cut.LSN)
	newest := r.Checkpoints[len(r.Checkpoints)-1]
	switch n := len(r.Cuts); {
	case !at.Cut.Of(r.homeID()):
		return refuse(CodeCutHome, c.cutOfAnotherHome(at.Seq, at.Cut, r.homeID()))
	case n > 0 && r.Cuts[n-1] == StoredCut{at.Cut.LSN, at.Seq}:
		return r, nil
	case n > 0 && (r.Cuts[n-1].LSN >= at.Cut.LSN || r.Cuts[n-1].Seq >= at.Seq):
		return refuse(CodeCutOrder, fmt.Sprintf("%s, and the record has one at %v", what, r.Cuts[n-1]))
	case newest.Due > at.Cut.LSN || newest.Seq >= at.Seq:
		return refuse(CodeCutOrder, fmt.Sprintf("%s, and the record has a checkpoint at %v, at sequence %d",
			what, newest.Due, newest.Seq))
	case at.Cut.Epoch > r.Epoch:
		return refuse(CodeCutOrder, fmt.Sprintf("%s in epoch %d, and the record has epoch %d", what,
			at.Cut.Epoch, r.Epoch))
	}
	next := *r
	next.Cuts = append(slices.Clone(r.Cuts), StoredCut{at.Cut.LSN, at.Seq})
	return &next, nil
}

// cutsFrom returns the cuts that a start from one of the checkpoints may come by.
func cutsFrom(cuts []StoredCut, checkpoints []StoredCheckpoint) []StoredCut {
	if len(checkpoints) == 0 {
		return cuts
	}
	return behind(cuts, checkpoints[0].Seq)
}

// behind returns the cuts behind a sequence. At the LSN of a cut there may be a checkpoint on either side of
// it: only its sequence says whether it is still to come.
func behind(cuts []StoredCut, seq uint64) []StoredCut {
	for i, c := range cuts {
		if c.Seq > seq {
			return cuts[i:]
		}
	}
	return nil
}

// validateOwner looks at what only the record of a stream that clusters share has.
func (r *Record) validateOwner() error {
	switch {
	case r.Epoch == 0 && (r.Owner != 0 || len(r.Cuts) > 0 || r.Confirmed != 0):
		return errors.New("an owner, a cut or what is confirmed without an epoch")
	case r.Epoch == 0:
		return nil
	case r.Version < clustersVersion || r.Mapping.Control == "":
		return fmt.Errorf("epoch %d in version %d, with control table %q", r.Epoch, r.Version,
			r.Mapping.Control)
	case r.Owner < 1 || r.Owner > outbox.MaxCluster:
		return fmt.Errorf("owner %d", r.Owner)
	case len(r.Cuts) > maxCuts:
		return fmt.Errorf("%d cuts, at most %d", len(r.Cuts), maxCuts)
	}
	for i, cut := range r.Cuts {
		if cut.LSN == 0 || cut.Seq <= r.Base ||
			i > 0 && (cut.LSN <= r.Cuts[i-1].LSN || cut.Seq <= r.Cuts[i-1].Seq) {
			return fmt.Errorf("cut %v is out of order", cut)
		}
	}
	if n := len(r.Checkpoints); n > 0 && r.Checkpoints[n-1].Published() < r.Confirmed {
		return fmt.Errorf("%v is confirmed, beyond the newest place, at %v", r.Confirmed,
			r.Checkpoints[n-1].Published())
	}
	if len(r.Cuts) == 0 || len(r.Checkpoints) == 0 {
		return nil
	}
	if p := r.Checkpoints[0]; r.Cuts[0].LSN < p.Due || r.Cuts[0].Seq <= p.Seq {
		return fmt.Errorf("cut %v does not lie behind the first place (%v, %d)", r.Cuts[0], p.Due, p.Seq)
	}
	return nil
}
