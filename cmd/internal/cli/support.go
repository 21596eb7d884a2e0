package cli

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/operate/doctor"
	"github.com/outflowhq/outflow/internal/operate/status"
	"github.com/outflowhq/outflow/internal/operate/support"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) supportCommand() *cobra.Command {
	o := support.Options{Timeout: 10 * time.Second}
	cmd := a.configured(&cobra.Command{
		Use:   "support",
		Short: "Put what a bug report needs into one file, without secrets",
		Long: `Gathers version, settings, what status and doctor say, pages and metrics of the
outflow that runs on this host, checkpoint record, stream and consumers, slot, publication and the table's
columns, and with --log the end of a log, and writes a tar.gz that only you may read. It changes nothing,
and works while servers are away: the file says what could not be read.

Passwords, tokens, keys and the contents of rows are replaced by ***. They are recognised by their values,
which the settings and the files that they name hold, and by their form; look at what is in the file
before you send it.

Exit code 0 if the file is written, also where something could not be read; 2 if the file can't be
written, or the log can't be read.`,
		Example: "  outflow support --config outflow.yaml\n" +
			"  outflow support --log /var/log/outflow.log --mask-hosts --output report.tar.gz",
	}, func(ctx context.Context, cfg config.Config) error {
		if o.Timeout <= 0 {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("--timeout %v is no time", o.Timeout),
				Hint:    "Give more than 0, such as 10s"}
		}
		o.Version, o.Environ, o.Log = a.buildInfo(), a.environ, newLogger(io.Discard, cfg)
		if cfg.Listen != "" {
			o.Pages = "http://" + local(cfg.Listen)
		}
		o.Say = func(format string, args ...any) { fmt.Fprintf(a.Stderr, format+"\n", args...) }
		o.Reports = []support.Report{
			{Name: "status.json", Read: func(ctx context.Context) (any, error) {
				return status.Read(ctx, cfg, o.Log)
			}},
			{Name: "doctor.json", Read: func(ctx context.Context) (any, error) {
				return doctor.Run(ctx, cfg, doctor.Options{Timeout: o.Timeout / 2, Log: o.Log})
			}},
		}
		return support.Run(ctx, cfg, o, a.Stdout)
	})
	f := cmd.Flags()
	f.StringVar(&o.Output, "output", "", "the file (default outflow-support-<slot>-<time>.tar.gz here)")
	f.StringVar(&o.LogFile, "log", "", "take along the last MiB of this log")
	f.BoolVar(&o.MaskHosts, "mask-hosts", false, "replace names and addresses of hosts")
	f.DurationVar(&o.Timeout, "timeout", o.Timeout, "how long reading each part may take")
	return cmd
}

// buildInfo is the version, what the binary was built from, and what it runs on.
func (a *App) buildInfo() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%d CPUs, GOMAXPROCS %d\n", a.VersionLine(), runtime.NumCPU(), runtime.GOMAXPROCS(0))
	if info, ok := debug.ReadBuildInfo(); ok {
		b.WriteString("\n" + info.String())
	}
	return b.String()
}
