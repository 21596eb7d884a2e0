package cli

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/crash"
	"github.com/outflowhq/outflow/internal/operate/args"
	"github.com/outflowhq/outflow/internal/operate/tail"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) tailCommand() *cobra.Command {
	var o tail.Options
	var since string
	cmd := a.configured(&cobra.Command{
		Use:   "tail",
		Short: "Show what is published, a line each: position, document, size, latency",
		Long: `Shows each message when it is stored in the stream, until Ctrl-C: the time, its
sequence, the position of its event in the WAL, subject, document, seq_key, id and type of the event, the
size of the payload, and how long it took. It begins with what is published from now on, unless --last,
--since or --seq says otherwise.

It reads through an ordered consumer, which acknowledges nothing, holds up nobody, and is deleted at the
end. While NATS is away it says so on standard error, and then goes on with the next sequence. Messages that
were removed are named there as well; with --doc or --filter only those that were removed from the beginning
of the stream.

latency is from the time that a mapped header says (headers: {Created: created_at}) to that at which the
stream stored the message; without such a header it is left out, because the Outflow header has no time.

Exit code 0 after --count messages, at Ctrl-C, and when the reader of the output has gone; 2 for options that
contradict each other, 3 if the stream can't be read.`,
		Example: "  outflow tail --doc note-17 --payload\n  outflow tail --last 100 --json\n" +
			"  outflow tail --since 10m --filter 'outbox.*'",
	}, func(ctx context.Context, cfg config.Config) error {
		begins := 0
		for _, given := range []bool{o.Last != 0, since != "", o.Seq != 0} {
			if given {
				begins++
			}
		}
		if begins > 1 || o.Last < 0 || o.Count < 0 {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: "it is not clear where to begin or to end",
				Hint:    "Give one of --last, --since and --seq, and no number below 0"}
		}
		if since != "" {
			var err error
			if o.Since, err = args.Time(since, time.Now()); err != nil {
				return &outbox.Fault{Class: outbox.Usage, Code: "flags",
					Message: fmt.Sprintf("--since %q: %v", since, err), Hint: "Give one of these"}
			}
		}
		o.Out, o.Log = a.Stdout, newLogger(io.Discard, cfg)
		o.Say = func(format string, args ...any) {
			a.printf(a.Stderr, a.Name+" tail: "+format+"\n", args...)
		}
		ctx, stop := whileRead(ctx, a.Stdout)
		defer stop()
		return tail.Run(ctx, cfg, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.Last, "last", 0, "begin with so many of the newest messages")
	f.StringVar(&since, "since", "",
		"begin with what was stored at this time, RFC 3339 or how long ago: 10m, 2d")
	f.Uint64Var(&o.Seq, "seq", 0, "begin with this sequence of the stream")
	f.StringArrayVar(&o.Docs, "doc", nil, "only events of this document; may be given several times")
	f.StringVar(&o.Filter, "filter", "",
		"only subjects that match this one, which may have the wildcards * and >")
	f.IntVar(&o.Count, "count", 0, "end after so many messages")
	f.BoolVar(&o.Payload, "payload", false, "also show the payload, the first 4 KiB of it")
	f.BoolVar(&o.JSON, "json", false, "print an object a line")
	return cmd
}

// whileRead returns a context that ends when nobody reads the output any more, also while there is nothing to
// write. A write to it is an error then, instead of the end of the process.
func whileRead(ctx context.Context, w io.Writer) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	signal.Ignore(syscall.SIGPIPE)
	file, ok := fileOf(w)
	if !ok {
		return ctx, cancel
	}
	go func() {
		defer crash.Guard()
		look := time.NewTicker(time.Second)
		defer look.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-look.C:
			}
			fd := []unix.PollFd{{Fd: int32(file.Fd())}}
			if n, err := unix.Poll(fd, 0); err == nil && n > 0 && fd[0].Revents&unix.POLLERR != 0 {
				cancel()
				return
			}
		}
	}()
	return ctx, cancel
}
