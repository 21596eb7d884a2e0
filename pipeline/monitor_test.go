package pipeline

import (
	"context"
	"errors"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

type serving struct{ Source }

func (serving) Slot(context.Context) (relay.SlotState, error)     { return relay.SlotState{}, nil }
func (serving) Server(context.Context) (relay.ServerState, error) { return relay.ServerState{}, nil }

// half is a broker that fails when its stream's configuration has been read.
type half struct {
	JetStream
	open string
}

func (h half) Tail(context.Context) (relay.StreamState, error) {
	return relay.StreamState{Open: h.open}, errors.New("the leader went away")
}
func (half) Lost() <-chan struct{} { return nil }

// TestAnOpenedStreamThatCantBeReadIsOpened: the change may have made its leader go away, as that of its
// replicas does. A session that only ended would leave no record of it.
func TestAnOpenedStreamThatCantBeReadIsOpened(t *testing.T) {
	t.Parallel()
	for _, open := range []string{"", "its subjects are two"} {
		c := &Conns{Source: serving{}, JetStream: half{open: open}}
		st, err := c.readStates(t.Context())
		if open == "" {
			if err == nil {
				t.Error("the state is known")
			}
			continue
		}
		f := outbox.FaultOf((&monitor{}).check(&st))
		if err != nil || f == nil || f.Code != "foreign_message" {
			t.Errorf("%v, %v", f, err)
		}
	}
}
