package pgserver

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	xactSegment = 256 << 10        // bytes of a file of pg_xact
	xactsEach   = xactSegment << 2 // transactions that it has the states of
)

// SkipTo makes a server that is stopped, and in whose databases everything is frozen, go on with transaction
// n and a new WAL, as if all transactions before it had run. n is a multiple of 2^20. It takes pg_resetwal,
// which not every installation has.
func (s *Server) SkipTo(ctx context.Context, n uint64) error {
	if n%xactsEach != 0 {
		return fmt.Errorf("transaction %d: want a multiple of %d", n, xactsEach)
	}
	states := filepath.Join(s.data(), "pg_xact", fmt.Sprintf("%04X", uint32(n)/xactsEach))
	if err := s.write(states, strings.Repeat("\x00", xactSegment)); err != nil {
		return err
	}
	out, err := s.command(ctx, "pg_resetwal", "-f", "-x", fmt.Sprint(uint32(n)+3), "-e", fmt.Sprint(n>>32),
		"-D", s.data()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("pg_resetwal: %w: %s", err, out)
	}
	return nil
}
