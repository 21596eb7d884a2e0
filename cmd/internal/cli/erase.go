package cli

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/erasure"
	"github.com/outflowhq/outflow/internal/operate/consumeradmin"
	"github.com/outflowhq/outflow/internal/operate/erase"
	"github.com/outflowhq/outflow/outbox"
)

// eraseTimeout is far above what an erasure takes that finds much to do.
const eraseTimeout = 24 * time.Hour

// eraseWait is how long it waits by default for slots, and for messages that can't go yet.
const eraseWait = time.Minute

func (a *App) eraseCommand() *cobra.Command {
	o := erase.Options{}
	var notify string
	var urls []string
	var asJSON bool
	cmd := a.configured(&cobra.Command{
		Use:   "erase",
		Short: "Erase a document everywhere; without --yes, say what would be erased",
		Long: `Erases a document: its rows, then, when every slot has confirmed that, its messages in
the stream, in the archive, in the streams of the account that copy them, and what consumers in the
databases of --database have parked. What is written later stays.
It prints what was reached and what was not, and keeps that in the table outflow_erasures. See
docs/erasure.md. Without --yes nothing is changed.

--request names it: run again with the same name, it goes on where it was, whatever ended it. It may be
killed at any point. The table has the request and an HMAC of the document, not its name.

Some messages can't go at once: those behind the confirmed checkpoint, the newest one, and what gap mode
remembers. They are waited for, for --wait, and then the command ends with exit code 1: run it again.

Exit code 0 if all was erased, or would be, 2 for a wrong option, 3 if the set-up cannot work or a server
can't be reached, 4 if an object of the archive is lost or damaged, or the servers are not those that the
request was begun on, 1 if something has to be waited for, or a server was lost: run it again.`,
		Example: "  outflow erase --doc customer-17 --request gdpr-2026-41\n" +
			"  outflow erase --doc customer-17 --request gdpr-2026-41 --yes\n" +
			"  outflow erase --doc customer-17 --request gdpr-2026-41 --notify '{\"erased\": true}' --yes",
	}, func(ctx context.Context, cfg config.Config) error {
		if notify != "" {
			if !json.Valid([]byte(notify)) {
				return &outbox.Fault{Class: outbox.Usage, Code: "flags", Message: "--notify is no JSON",
					Hint: "Give the payload of the last event"}
			}
			o.Notify = []byte(notify)
		}
		ctx, cancel := context.WithTimeout(ctx, eraseTimeout)
		defer cancel()
		if a.faults != nil {
			o.Hit = a.faults.Hit
		}
		databases := a.consumerTargets(cfg, urls)
		o.Parked = func(ctx context.Context, api *jsapi.Client, streams []string, erase bool,
			is func(*erasure.Parked) bool, hit func()) (erasure.FoundParked, error) {
			return consumeradmin.EraseParked(ctx, api, streams, databases, erase, is, hit)
		}
		report, err := erase.Run(ctx, cfg, newLogger(a.Stderr, cfg), o)
		if report == nil {
			return err
		}
		if asJSON {
			return errors.Join(err, a.printJSON(report))
		}
		a.printf(a.Stdout, "at %v\n", a.where)
		a.printLines(report.Lines())
		if err == nil && !o.Yes && report.Finished == nil {
			a.printf(a.Stdout, "Nothing was changed. To do it: `%s`\n", eraseAgain(o, notify, urls))
		}
		return err
	})
	f := cmd.Flags()
	f.StringVar(&o.Doc, "doc", "", "the `document` that is erased")
	f.StringVar(&o.Request, "request", "", "the `name` of the request, which outlives it: no personal data")
	f.StringVar(&notify, "notify", "", "write a last event of the document first, with this payload, `JSON`")
	f.StringVar(&o.Key, "notify-key", "", "the key of that event, where the table has a column for it")
	consumerDatabases(f, &urls)
	f.StringArrayVar(&o.Copies, "copy", nil, "another `stream` of the account with copies, repeatable")
	f.DurationVar(&o.Wait, "wait", eraseWait,
		"wait so long for slots, replicas, and messages that can't go yet")
	f.BoolVar(&o.Yes, "yes", false, "do it")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

// eraseAgain is the command line that does what was asked. What a later run adds may be too late: there is no
// last event any more when the rows are gone.
func eraseAgain(o erase.Options, notify string, urls []string) string {
	line := "outflow erase --doc " + finding.Word(o.Doc) + " --request " + o.Request
	add := func(flag string, values ...string) {
		for _, v := range values {
			if v != "" {
				line += " " + flag + " " + finding.Word(v)
			}
		}
	}
	add("--notify", notify)
	add("--notify-key", o.Key)
	for _, url := range urls {
		add("--database", config.HidePasswords(url))
	}
	add("--copy", o.Copies...)
	return line + " --yes"
}
