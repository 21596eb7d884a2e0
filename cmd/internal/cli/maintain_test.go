package cli

import (
	"bytes"
	"context"
	"testing"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/watch"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/operate/conns"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/postgres"
)

// TestRoundsOfMaintainAddNothingToSuggestedCommands: the databases are named once, however often it looks
// into them.
func TestRoundsOfMaintainAddNothingToSuggestedCommands(t *testing.T) {
	t.Parallel()
	cfg, err := config.Load(config.Args{"postgres.url": "postgres://anna@127.0.0.1:1/db",
		"nats.url": "nats://127.0.0.1:1", "retain.stream.messages": "1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	where := wiring.WhereIs(cfg)
	a := &App{Name: "outflow", Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}, where: &where}
	c, err := a.maintenance(cfg, []string{"postgres://anna@127.0.0.1:1/texts"}, false)
	if err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for range 3 {
		for _, part := range c.Parts {
			if err := part.Run(ended, &watch.Maintained{}); err == nil {
				t.Errorf("part %s worked without servers", part.Name)
			}
		}
	}
	if len(a.repeat) != 1 {
		t.Errorf("suggested commands would repeat %q", a.repeat)
	}
}

// TestOnlyRunHasTheNameOfRun: whoever counts the Outflows of a slot counts no command.
func TestOnlyRunHasTheNameOfRun(t *testing.T) {
	t.Parallel()
	for use, want := range map[string]string{"run": "", "maintain": "maintain", "repair": "repair"} {
		a := &App{Name: "outflow", Stderr: &bytes.Buffer{}, args: config.Args{}}
		a.throughLine()
		root, cmd := &cobra.Command{Use: "outflow"}, &cobra.Command{Use: use}
		root.AddCommand(cmd)
		a.configured(cmd, func(_ context.Context, cfg config.Config) error {
			pg := wiring.Catalog(cfg)
			owner := conns.Owner(cfg, relay.ServerState{})
			if got := pg.Target().Command; got != want || owner.Command != want {
				t.Errorf("%s connects as %q, and as the owner as %q", use, got, owner.Command)
			}
			return nil
		})
		if err := cmd.RunE(cmd, nil); err != nil {
			t.Error(err)
		}
	}
}

// TestConsumersAreLookedForOnThePrimary: postgres.url may be a standby, which is refused. Where it is none,
// postgres.write_url may be a pooler, or a role that may write ticks and read nothing.
func TestConsumersAreLookedForOnThePrimary(t *testing.T) {
	t.Parallel()
	const env = config.ConsumerDatabaseEnv
	for _, c := range []struct {
		write   string
		environ []string
		want    postgres.Target
	}{
		{"", nil, postgres.Target{Setting: "postgres.url", URL: "postgres://one"}},
		{"postgres://two", nil, postgres.Target{Setting: "postgres.url", URL: "postgres://one",
			Primary: "postgres://two"}},
		{"postgres://two", []string{env + "=postgres://three"}, postgres.Target{Setting: env,
			URL: "postgres://three"}},
	} {
		args := config.Args{"postgres.url": "postgres://one"}
		if c.write != "" {
			args["postgres.write_url"] = c.write
		}
		cfg, err := config.Load(args, nil)
		if err != nil {
			t.Fatal(err)
		}
		a, want := &App{where: &wiring.Where{}, environ: c.environ}, c.want
		want.Pooled = true
		if all := a.consumerTargets(cfg, nil); len(all) != 1 || all[0] != want {
			t.Errorf("%+v, want %+v", all, want)
		}
	}
}

// TestConsumersOfADatabaseThatWasNotReadAreNotSaidToBeNone: the database was away, and nobody is to delete a
// stream because of that.
func TestConsumersOfADatabaseThatWasNotReadAreNotSaidToBeNone(t *testing.T) {
	t.Parallel()
	for read, want := range map[bool]string{
		true:  "stream S has no consumers\n",
		false: "NATS has no consumers of stream S; those of the database are not known\n",
	} {
		var out bytes.Buffer
		a := &App{Name: "outflow", Stdout: &out}
		if err := a.printConsumers("S", read, nil); err != nil || out.String() != want {
			t.Errorf("read %v: %q %v", read, out.String(), err)
		}
	}
}
