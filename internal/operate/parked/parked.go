// Package parked is `outflow parked`: it shows the parked events of consumers, asks for their release, and
// waits until the running consumer has done that.
package parked

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/outbox"
)

// Command is one call of `outflow parked`.
type Command struct {
	Parked   *consumer.Parked
	JSON     bool
	Out, Log io.Writer // for results and for messages
}

// List prints the parked documents of a consumer, or of all ("").
func (c *Command) List(ctx context.Context, name string, limit int) error {
	all, err := c.Parked.List(ctx, name, limit)
	if err != nil {
		return err
	}
	if c.JSON {
		return c.print(append([]consumer.ParkedDocument{}, all...))
	}
	if len(all) == 0 {
		fmt.Fprintln(c.Out, "nothing is parked")
		return nil
	}
	table := tabwriter.NewWriter(c.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "CONSUMER\tDOCUMENT\tEVENTS\tSINCE\tATTEMPTS\tRELEASE\tERROR")
	for _, d := range all {
		fmt.Fprintf(table, "%s\t%s\t%d\t%s\t%d\t%s\t%s\n", d.Consumer, visible(d.Document), d.Events,
			d.First.ParkedAt.UTC().Format(time.RFC3339), d.First.Attempts, d.Release, line(d.First.Error, 80))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if len(all) == limit {
		fmt.Fprintf(c.Log, "There may be more: these are the first %d (--limit).\n", limit)
	}
	return nil
}

// Show prints a parked document and its first events.
func (c *Command) Show(ctx context.Context, name, document string, limit int) error {
	d, err := c.Parked.Document(ctx, name, document)
	if err != nil {
		return err
	}
	rows, err := c.Parked.Events(ctx, name, document, limit)
	if err != nil {
		return err
	}
	if c.JSON {
		return c.print(struct {
			*consumer.ParkedDocument
			Rows []consumer.ParkedRow `json:"rows"`
		}{d, rows})
	}
	fmt.Fprintf(c.Out, "document %s of consumer %s: %s parked, the newest at %s", visible(d.Document),
		name, units.Of(d.Events, "event"), d.Last.UTC().Format(time.RFC3339))
	if d.Release != "" {
		fmt.Fprintf(c.Out, "; to be released (%s)", d.Release)
	}
	fmt.Fprintln(c.Out)
	for i := range rows {
		c.row(&rows[i])
	}
	if more := d.Events - int64(len(rows)); more > 0 {
		fmt.Fprintf(c.Out, "\nand %d more (--limit)\n", more)
	}
	return nil
}

func (c *Command) row(r *consumer.ParkedRow) {
	fmt.Fprintf(c.Out, "\n%s  sequence %d (%s)  position %s  id %s\n", r.Cause, r.Sequence, r.Source,
		r.Position, visible(r.ID))
	table := tabwriter.NewWriter(c.Out, 0, 0, 2, ' ', 0)
	for _, field := range [][2]string{
		{"subject", r.Subject}, {"published", r.Time.UTC().Format(time.RFC3339Nano)},
		{"parked", r.ParkedAt.UTC().Format(time.RFC3339)},
		{"attempts", strconv.Itoa(r.Attempts)}, {"headers", line(string(r.Headers), 400)},
		{"data", line(string(r.Data), 2000)},
	} {
		fmt.Fprintf(table, "  %s\t%s\n", field[0], field[1])
	}
	_ = table.Flush() // the next write returns the same error
	for l := range strings.Lines(r.Error) {
		fmt.Fprintf(c.Out, "  | %s\n", strings.TrimRight(l, "\r\n"))
	}
}

// Release asks to retry or skip documents.
type Release struct {
	Consumer  string
	Documents []string
	All       bool // all parked documents
	Skip      bool
	Wait      bool
	Timeout   time.Duration // of the waiting
}

// Result is the outcome for a document. The JSON names are stable.
type Result struct {
	Document string `json:"document"`
	State    string `json:"state"`           // asked, released, failed, waiting
	Left     int64  `json:"left"`            // events that are still parked
	Error    string `json:"error,omitempty"` // of the first one of them
}

// The states of a result.
const (
	asked    = "asked"    // the consumer will do it
	released = "released" // none of its events is parked any more
	failed   = "failed"   // an event failed again
	waiting  = "waiting"  // not done before the timeout
)

// maxAll is how many documents are asked for at a time with All.
const maxAll = 1000

// errNotDone says that not every document was released while the command waited. The outcomes are printed.
var errNotDone = errors.New("not everything was released")

// Release asks the running consumer to release documents and, if told to, waits until it has done so.
func (c *Command) Release(ctx context.Context, r Release) error {
	documents := r.Documents
	if r.All {
		list, err := c.Parked.List(ctx, r.Consumer, maxAll)
		if err != nil {
			return err
		}
		for _, d := range list {
			documents = append(documents, d.Document)
		}
		if len(documents) == maxAll {
			fmt.Fprintf(c.Log, "There may be more: these are the first %d. Run it again.\n", maxAll)
		}
	}
	do := c.Parked.Retry
	if r.Skip {
		do = c.Parked.Skip
	}
	results := make([]Result, 0, len(documents))
	for _, document := range documents {
		err := do(ctx, r.Consumer, document)
		if f := outbox.FaultOf(err); r.All && f != nil && f.Code == consumer.CodeNotParked {
			continue // it has just been released
		}
		if err != nil {
			return err
		}
		results = append(results, Result{Document: document, State: asked})
	}
	running, err := c.Parked.Running(ctx, r.Consumer)
	if err != nil {
		return err
	}
	if len(running) == 0 {
		fmt.Fprintf(c.Log, "Consumer %s does not run at present: it is done when it runs again.\n",
			r.Consumer)
	}
	if r.Wait {
		err = c.wait(ctx, r, results)
	}
	return errors.Join(c.results(results), err)
}

// wait waits for all results.
func (c *Command) wait(ctx context.Context, r Release, results []Result) error {
	timeout := time.NewTimer(r.Timeout)
	defer timeout.Stop()
	look := time.NewTicker(200 * time.Millisecond)
	defer look.Stop()
	task := progress.Count(ctx, "waiting for consumer "+r.Consumer, "documents released",
		int64(len(results)))
	defer task.End()
	var open int
	for late := false; ; {
		open = 0
		for i := range results {
			if err := c.look(ctx, r.Consumer, &results[i]); err != nil {
				return err
			}
			if results[i].State == asked {
				open++
			}
		}
		task.Set(int64(len(results) - open))
		if open == 0 || late {
			break
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timeout.C:
			late = true
		case <-look.C:
		}
	}
	bad := open
	for i := range results {
		switch results[i].State {
		case asked:
			results[i].State = waiting
		case failed:
			bad++
		}
	}
	if bad > 0 {
		return fmt.Errorf("%w: %d of %d documents; those still waiting after %v are released when the "+
			"consumer gets to them", errNotDone, bad, len(results), r.Timeout)
	}
	return nil
}

// look updates a result.
func (c *Command) look(ctx context.Context, name string, r *Result) error {
	if r.State != asked {
		return nil
	}
	d, err := c.Parked.Document(ctx, name, r.Document)
	switch f := outbox.FaultOf(err); {
	case f != nil && f.Code == consumer.CodeNotParked:
		r.State, r.Left = released, 0
		return nil
	case err != nil:
		return err
	}
	if r.Left = d.Events; d.Release == "" {
		r.State, r.Error = failed, d.First.Error
	}
	return nil
}

func (c *Command) results(results []Result) error {
	if c.JSON {
		return c.print(results)
	}
	for _, r := range results {
		switch r.State {
		case asked:
			fmt.Fprintf(c.Out, "%s: to be released\n", visible(r.Document))
		case released:
			fmt.Fprintf(c.Out, "%s: released\n", visible(r.Document))
		case failed:
			fmt.Fprintf(c.Out, "%s: failed again, %s %s still parked: %s\n", visible(r.Document),
				units.Of(r.Left, "event"), units.Agree(r.Left, "is", "are"), line(r.Error, 200))
		case waiting:
			fmt.Fprintf(c.Out, "%s: still to be released, %s %s parked\n", visible(r.Document),
				units.Of(r.Left, "event"), units.Agree(r.Left, "is", "are"))
		}
	}
	if len(results) == 0 {
		fmt.Fprintln(c.Out, "nothing is parked")
	}
	return nil
}

func (c *Command) print(v any) error {
	e := json.NewEncoder(c.Out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// visible is a name for printing: quoted if it would otherwise be invisible or ambiguous.
func visible(s string) string {
	if q := strconv.Quote(s); s == "" || strings.ContainsAny(s, " \t") || q != `"`+s+`"` {
		return q
	}
	return s
}

// line is the first line of a text, cut after n bytes.
func line(s string, n int) string {
	first, _, more := strings.Cut(s, "\n")
	if !utf8.ValidString(first) ||
		strings.ContainsFunc(first, func(r rune) bool { return !strconv.IsPrint(r) }) {
		first = strconv.Quote(first)
	}
	if len(first) > n {
		first, more = strings.ToValidUTF8(first[:n], ""), true
	}
	if more {
		first += "…"
	}
	return first
}
