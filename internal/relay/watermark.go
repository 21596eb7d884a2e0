package relay

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// WatermarkPrefix is the prefix of the control row in which a home says what it has published. It is no
// input.
const WatermarkPrefix = "outflow.watermark"

// Tally counts the events of a home in the order of their commits. Whoever reads the same commits has the
// same one, wherever that is.
type Tally struct {
	Since  outbox.LSN `json:"since"`  // of the commits that end above it; 0: nothing was counted
	Events uint64     `json:"events"` // how many they have
	// Sum is that of [CommitSum] over those of them with events, modulo 2^64: where one is missing and
	// another one is there, the number may be the same.
	Sum uint64 `json:"sum"`
}

// CommitSum is what a commit with events adds to [Tally.Sum].
func CommitSum(c *Commit) uint64 {
	var b [24]byte
	binary.BigEndian.PutUint64(b[:], uint64(c.LSN))
	binary.BigEndian.PutUint64(b[8:], uint64(c.Time))
	binary.BigEndian.PutUint64(b[16:], uint64(c.Events))
	sum := sha256.Sum256(b[:])
	return binary.BigEndian.Uint64(sum[:])
}

// Confirmed is up to where a home has confirmed its WAL.
type Confirmed struct {
	LSN      outbox.LSN `json:"lsn"`      // what ends there or before is in its stream for good
	Timeline uint32     `json:"timeline"` // its server's at that time
}

// Watermark is what a home says of itself to whoever reads its rows elsewhere.
type Watermark struct {
	Confirmed
	Began outbox.LSN // where Timeline began; 0: it is the first one
	At    outbox.LSN // up to there Tally counts: a checkpoint that is recorded lies there
	Tally            // Since is 0 where the home has not counted
}

// Said is the newest watermark that a home has written, or that was read of it elsewhere. It is for people:
// nothing depends on it.
type Said struct {
	// when it was written, by the clock of the home's outflow; elsewhere when it was committed, by that of
	// the home's server
	At     time.Time  `json:"at"`
	LSN    outbox.LSN `json:"lsn"`    // up to which it says that the home has confirmed its WAL
	Events uint64     `json:"events"` // that it counts
}

// Content is the content of the control row.
func (w Watermark) Content() string {
	return fmt.Sprintf("v=1 confirmed=%v timeline=%d began=%v at=%v since=%v events=%d sum=%016x", w.LSN,
		w.Timeline, w.Began, w.At, w.Since, w.Events, w.Sum)
}

// ParseWatermark reads exactly what [Watermark.Content] writes, of a commit that ends at lsn. It is a claim
// of whoever may write control rows: one of a version that is not known, or of what comes behind it, is an
// error.
func ParseWatermark(content string, lsn outbox.LSN) (w Watermark, err error) {
	fail := func(format string, args ...any) (Watermark, error) {
		return Watermark{}, fmt.Errorf("watermark %q: %w", content, fmt.Errorf(format, args...))
	}
	_, err = fmt.Sscanf(content, "v=1 confirmed=%v timeline=%d began=%v at=%v since=%v events=%d sum=%x",
		scannedLSN{&w.LSN}, &w.Timeline, scannedLSN{&w.Began}, scannedLSN{&w.At}, scannedLSN{&w.Since},
		&w.Events, &w.Sum)
	switch {
	case err != nil:
		return fail("%w", err)
	case w.Content() != content:
		return fail("it would be written %q", w.Content())
	case w.Timeline == 0 || w.LSN == 0:
		return fail("confirmed %v on timeline %d", w.LSN, w.Timeline)
	case w.LSN >= lsn || w.At >= lsn || w.Began >= lsn:
		return fail("it speaks of what comes behind its own commit at %v", lsn)
	case w.Since > w.At:
		return fail("it counts from %v to %v", w.Since, w.At)
	}
	return w, nil
}
