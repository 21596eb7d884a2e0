package relay

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
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

// The keys of a watermark, in their order.
var watermarkKeys = [...]string{"confirmed=", "timeline=", "began=", "at=", "since=", "events=", "sum="}

const watermarkVersion = 1

// Content is the content of the control row.
func (w Watermark) Content() string {
	return fmt.Sprintf("v=%d confirmed=%v timeline=%d began=%v at=%v since=%v events=%d sum=%016x",
		watermarkVersion, w.LSN, w.Timeline, w.Began, w.At, w.Since, w.Events, w.Sum)
}

// ParseWatermark reads what [Watermark.Content] writes of a commit that ends at lsn. It is a claim of whoever
// may write control rows: one of a version that is not known, or of what comes behind it, is an error.
func ParseWatermark(content string, lsn outbox.LSN) (w Watermark, err error) {
	fail := func(format string, args ...any) (Watermark, error) {
		return Watermark{}, fmt.Errorf("watermark %q: %s", content, fmt.Sprintf(format, args...))
	}
	version, rest, _ := strings.Cut(content, " ")
	if v, ok := strings.CutPrefix(version, "v="); !ok || v != strconv.Itoa(watermarkVersion) {
		return fail("version %q is not known", version)
	}
	for i, key := range watermarkKeys {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		value, ok := strings.CutPrefix(field, key)
		if !ok {
			return fail("want %s", key)
		}
		var n uint64
		switch i {
		case 0:
			w.LSN, err = outbox.ParseLSN(value)
		case 1:
			n, err = strconv.ParseUint(value, 10, 32)
			w.Timeline = uint32(n)
		case 2:
			w.Began, err = outbox.ParseLSN(value)
		case 3:
			w.At, err = outbox.ParseLSN(value)
		case 4:
			w.Since, err = outbox.ParseLSN(value)
		case 5:
			w.Events, err = strconv.ParseUint(value, 10, 64)
		case 6:
			w.Sum, err = strconv.ParseUint(value, 16, 64)
		}
		if err != nil {
			return fail("%s %v", strings.TrimSuffix(key, "="), err)
		}
	}
	switch {
	case rest != "":
		return fail("something follows")
	case w.Timeline == 0 || w.LSN == 0:
		return fail("confirmed %v on timeline %d", w.LSN, w.Timeline)
	case w.LSN >= lsn || w.At >= lsn || w.Began >= lsn:
		return fail("it speaks of what comes behind its own commit at %v", lsn)
	case w.Since > w.At:
		return fail("it counts from %v to %v", w.Since, w.At)
	}
	return w, nil
}
