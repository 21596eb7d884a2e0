package erase

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// silent is how long a leader has heard nothing of a replica that counts as away.
const silent = 10 * time.Second

// replicas waits until each replica of a stream has all that its leader has. One that was away while messages
// were erased may hear of it by a snapshot, and then it does not overwrite them in its files: so nothing is
// erased while one is away. erased: something was, and one that is away now is noted.
func (c *command) replicas(ctx context.Context, name string, until time.Time, erased bool) (bool, error) {
	defer progress.Wait(ctx, "waiting for the replicas of stream "+name)()
	for {
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		info, err := jsapi.Stream[struct{}](ask, c.l.NATS.API(), name)
		cancel()
		switch {
		case err != nil:
			return false, err
		case info == nil:
			return false, &outbox.Fault{Class: outbox.Gap, Code: "stream_recreated",
				Message: fmt.Sprintf("stream %s was deleted while this ran", name)}
		}
		behind, away := lagging(info.Cluster)
		if !info.Led() {
			behind = append(behind, "its leader")
		}
		if len(behind) == 0 {
			return true, nil
		}
		if erased {
			if err := c.away(ctx, name, away); err != nil {
				return false, err
			}
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("replicas of stream %s are away or lag "+
				"behind: %s. One that does not come back: `nats stream cluster peer-remove`", name,
				strings.Join(behind, ", ")))
			return false, err
		}
	}
}

// lagging names the replicas that do not have all that the leader has, and those of them that are away.
func lagging(cluster *jsapi.Cluster) (behind, away []string) {
	if cluster == nil {
		return nil, nil
	}
	for _, r := range cluster.Replicas {
		gone := r.Offline || r.Active > silent
		if gone {
			away = append(away, r.Name)
		}
		if gone || !r.Current {
			behind = append(behind, r.Name)
		}
	}
	return behind, away
}

// away notes that replicas are.
func (c *command) away(ctx context.Context, name string, away []string) error {
	noted := len(c.rec.Away)
	for _, r := range away {
		if r = "replica " + r + " of stream " + name; !slices.Contains(c.rec.Away, r) {
			c.rec.Away = append(c.rec.Away, r)
		}
	}
	if len(c.rec.Away) == noted {
		return nil
	}
	return c.ledger.Save(ctx, c.rec)
}
