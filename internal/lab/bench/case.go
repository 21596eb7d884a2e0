package bench

import (
	"fmt"
	"strings"
	"time"
)

// kind says what a case's contenders have to do.
type kind string

const (
	drain   kind = "drain"   // publish a backlog that was written while nobody read
	latency kind = "latency" // publish a steady rate; the delay counts
	restart kind = "restart" // kill -9 behind a backlog, and a start at once; the delay counts
)

// Case is what the contenders are given.
type Case struct {
	Name  string `json:"name"`
	Kind  kind   `json:"kind"`
	Point string `json:"point,omitempty"` // of a sweep: what this one varies, e.g. "1 KB"

	Rows      int `json:"rows,omitempty"` // of a backlog
	PerTx     int `json:"rows_per_transaction"`
	Documents int `json:"documents"`
	Actors    int `json:"actors"`
	Payload   int `json:"payload_bytes"` // about
	Replicas  int `json:"replicas"`
	Rate      int `json:"commits_per_second,omitempty"` // that are tried

	Horizon  time.Duration   `json:"horizon_ns"`
	Horizons []time.Duration `json:"-"`                     // latency: each is a contender
	Sync     bool            `json:"sync_always,omitempty"` // NATS syncs before it acknowledges
}

// title is the head of a case's table.
func (c *Case) title() string {
	what := strings.TrimSpace(c.Name + " " + c.Point)
	what += fmt.Sprintf(", %s a transaction", count(c.PerTx, "row"))
	switch c.Kind {
	case drain, restart:
		what += fmt.Sprintf(", %s", count(c.Rows, "row"))
	case latency:
		what += fmt.Sprintf(", %d commits/s", c.Rate)
	}
	return what
}

func count(n int, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}
