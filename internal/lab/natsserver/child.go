package natsserver

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// childEnv, if it is set, makes this program a server with the options that it holds as JSON. It does not
// begin with OUTFLOW_: that is for settings.
const childEnv = "_OUTFLOW_NATS_SERVER"

// readyLine is what a child prints when it accepts connections.
const readyLine = "ready"

// Child makes this process the NATS server of a Process, if it was started as one, and never returns then. A
// program or a package's tests that start a Process call it first in main or TestMain.
func Child() {
	spec, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := serve(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve runs until SIGTERM, or until the parent has gone and standard input ends.
func serve(spec string) error {
	var o Options
	if err := json.Unmarshal([]byte(spec), &o); err != nil {
		return fmt.Errorf("%s: %w", childEnv, err)
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	s, err := Start(o)
	if err != nil {
		return err
	}
	fmt.Println(readyLine)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		terminate <- syscall.SIGTERM
	}()
	<-terminate
	s.Shutdown()
	return nil
}
