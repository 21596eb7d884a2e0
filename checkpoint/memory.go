package checkpoint

import (
	"context"
	"fmt"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Memory says what gap mode reads back from the stream before the first input: the headers of the newest n of
// our messages at or below sequence upTo, and none at or below sequence above. What to make of the answer:
// [Config.CheckMemory].
//
// A hole holds no message, so above lies as much lower as there are holes between. Among the messages that a
// repair accepted there may be some that are not ours, so where it has to look there above is 0. So it is
// where cuts may lie between, which no record keeps for so long.
func (s Start) Memory() (above, upTo uint64, n int) {
	p := s.Checkpoint
	above = below(s.Holes, p.Seq, uint64(p.Remembered))
	if above < s.Accepted || s.Shared {
		above = 0
	}
	return above, p.Seq, p.Remembered
}

// recentTimeout is how long the messages may take that gap mode remembers: the default number takes 0.1 s by
// a consumer, the greatest one many seconds, and where no consumer can be made it is several times that.
const recentTimeout = 60 * time.Second

// Recent reads what [Start.Memory] says: the counters, newest first. read is the stream's Recent.
func (s Start) Recent(ctx context.Context,
	read func(ctx context.Context, above, upTo uint64, n int) ([]outbox.Counter, error),
) ([]outbox.Counter, error) {
	above, upTo, n := s.Memory()
	if n == 0 && !s.Checkpoint.Settings.ByGap() {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, recentTimeout)
	defer cancel()
	// One message at least: a right that is missing shows at the first start in gap mode, not at a later one.
	all, err := read(ctx, above, upTo, max(n, 1))
	if err != nil {
		return nil, fmt.Errorf("read the counters of the stream's last %d messages: %w", n, err)
	}
	return all[:min(n, len(all))], nil
}

// CheckMemory refuses a start that found so many of the messages that [Start.Memory] asks for: a gap fault
// with code memory_lost where they are fewer. The checkpoint counted messages that were in the stream. So a
// young stream has all that are asked for, and where one is missing it has been removed. Without it the WAL
// would be put into another order than the one in which its last messages were.
//
// Like any gap it counts when a recheck agrees.
func (c Config) CheckMemory(s Start, found int) error {
	above, upTo, n := s.Memory()
	if found >= n {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: "memory_lost",
		Message: fmt.Sprintf("of the newest %d messages up to sequence %d of stream %s, which gap mode "+
			"remembers, only %d are above sequence %d: the others were removed",
			n, upTo, c.Stream, found, above),
		Hint: c.hintMemoryLost(n),
		From: s.Checkpoint.Start(), To: max(s.Thru, s.Checkpoint.Due),
	}
}

// Limits are those that remove a stream's messages by themselves; 0 is none. Messages and Bytes count only
// where the stream discards old messages to take new ones.
type Limits struct {
	Age                  time.Duration
	Messages, PerSubject int64
	Bytes                int64
	Average              int64 // bytes of a message, at present; 0 where there is none
}

// CheckLimits refuses limits that could remove messages that gap mode remembers: a fatal fault with code
// memory_limits. memory is [relay.Gap.Memory].
//
// A maximum age removes all of them when nothing is written for so long, and a limit per subject removes some
// from between the others: neither can be right. A limit on messages or bytes must leave room for twice as
// many as are remembered, by the present size of a message: they are counted from a checkpoint, and the
// stream goes on beyond it. Where that was not enough, CheckMemory says so.
func (c Config) CheckLimits(memory int, l Limits) error {
	room := 2 * int64(memory)
	what, hint := "", ""
	switch {
	case l.Age > 0:
		what, hint = fmt.Sprintf("max_age %v", l.Age), "--max-age=0"
	case l.PerSubject > 0:
		what, hint = fmt.Sprintf("max_msgs_per_subject %d", l.PerSubject), "--max-msgs-per-subject=-1"
	case l.Messages > 0 && l.Messages < room:
		what, hint = fmt.Sprintf("max_msgs %d", l.Messages), fmt.Sprintf("--max-msgs=%d", room)
	case l.Bytes > 0 && l.Average > 0 && l.Bytes/l.Average < room:
		what = fmt.Sprintf("max_bytes %d, room for about %d messages", l.Bytes, l.Bytes/l.Average)
		hint = fmt.Sprintf("--max-bytes=%d", room*l.Average)
	default:
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: "memory_limits",
		Message: fmt.Sprintf("stream %s has %s, which can remove some of the newest %d messages: gap mode "+
			"remembers these", c.Stream, what, memory),
		Hint: c.hintMemoryLimits(hint),
	}
}
