package stage

import (
	"flag"
	"fmt"
	"os"
)

// ParseFlags reads the command line of a demo. Its script gives flags of its own, so what is wrong is
// answered with how the script is called. Arguments are refused: what stands there was meant to be a flag.
func ParseFlags(usage string) {
	flag.Usage = func() { fmt.Fprintln(flag.CommandLine.Output(), "usage:", usage) }
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "%q is no flag\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
}
