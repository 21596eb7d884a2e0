// Command outflow-lab shows, attacks and measures Outflow: demo, torture and bench, with the PostgreSQL and
// NATS servers that they start. It has the commands of outflow as well, not listed, so that what it attacks
// is a process of its own binary, which kills itself where OUTFLOW_FAILPOINT says so. It is for laptops and
// test machines: outflow is what belongs into production.
package main

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/cmd/internal/cli"
	"github.com/outflowhq/outflow/internal/lab/bench"
	"github.com/outflowhq/outflow/internal/lab/failpoint"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
)

func main() {
	natsserver.Child() // NATS servers are processes of this program
	bench.Child()      // and so are bench's writers, and what it compares with
	cli.Main(&cli.App{Name: "outflow-lab", Arm: arm}, root)
}

// arm reads OUTFLOW_FAILPOINT.
func arm(environ []string) (cli.Faults, []string, error) {
	faults, err := failpoint.FromEnviron(environ)
	rest := slices.DeleteFunc(slices.Clone(environ), failpoint.Sets)
	if faults == nil {
		return nil, rest, err
	}
	return faults, rest, err
}

func root(a *cli.App) *cobra.Command {
	service := a.Service()
	for _, cmd := range service {
		cmd.Hidden = true
	}
	return a.Root(&cobra.Command{
		Short: "Show, attack and measure Outflow with servers that it starts for the moment",
		Long: `Shows, attacks and measures Outflow, with the PostgreSQL and NATS servers that it
starts for the moment.

Exit codes: 0 clean, 1 unexpected or interrupted, 2 a wrong option, 3 a run that could not be carried out, 4
a bad verdict.`,
		Example: "  outflow-lab demo\n  outflow-lab torture\n  outflow-lab bench",
	}, append([]*cobra.Command{demoCommand(a), tortureCommand(a), benchCommand(a)}, service...)...)
}
