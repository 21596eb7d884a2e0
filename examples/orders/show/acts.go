package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outflowhq/outflow/examples/internal/stage"
	"github.com/outflowhq/outflow/internal/lab/freeport"
)

const (
	customers = 8
	lease     = "1s" // so that an instance that was killed is soon followed by the other one
)

// enter starts the programs.
func (p *play) enter(ctx context.Context) (err error) {
	port, err := freeport.Port()
	if err != nil {
		return err
	}
	listen := fmt.Sprintf("127.0.0.1:%d", port)
	p.api = "http://" + listen
	if p.streamer, err = p.Outflow(ctx); err != nil {
		return err
	}
	if p.shop, err = p.Start("api", p.binary, "api", "-listen", listen); err != nil {
		return err
	}
	for i := range p.reservers {
		if p.reservers[i], err = p.Start(fmt.Sprintf("reserve-%d", i+1), p.binary, "reserve", "-lease",
			lease); err != nil {
			return err
		}
	}
	return nil
}

// acts are what happens while orders are placed, one after the other.
var acts = []func(p *play, ctx context.Context) error{
	func(*play, context.Context) error { return nil },
	func(p *play, _ context.Context) error { return p.strike(p.reservers[0]) },
	func(p *play, _ context.Context) error { return p.strike(p.reservers[1]) },
	func(p *play, _ context.Context) error { return p.strike(p.streamer) },
	func(p *play, _ context.Context) error { return p.strike(p.shop) },
	func(p *play, _ context.Context) error { return p.strike(p.reservers[0], p.reservers[1], p.streamer) },
	func(p *play, ctx context.Context) error { // a deploy
		p.Say("  %-9s stopped cleanly and started again", p.reservers[0].Name)
		if err := p.reservers[0].Stop(ctx); err != nil {
			return err
		}
		return p.reservers[0].Again()
	},
}

// strike kills programs with kill -9 and starts them again.
func (p *play) strike(actors ...*stage.Actor) error {
	for _, a := range actors {
		if err := a.Kill(); err != nil {
			return err
		}
		p.Say("  %-9s kill -9", a.Name)
	}
	for _, a := range actors {
		if err := a.Again(); err != nil {
			return err
		}
	}
	return nil
}

// perform places the orders, and has each act when half of its share of them is placed.
func (p *play) perform(ctx context.Context) error {
	for i, act := range acts {
		from, to := i*p.orders/len(acts), (i+1)*p.orders/len(acts)
		g, gctx := errgroup.WithContext(ctx)
		var placed atomic.Int64
		half := make(chan struct{})
		for c := range customers {
			g.Go(func() error {
				for n := from + c; n < to; n += customers {
					if err := p.order(gctx); err != nil {
						return err
					}
					if placed.Add(1) == int64((to-from+1)/2) {
						close(half)
					}
				}
				return nil
			})
		}
		g.Go(func() error {
			select {
			case <-half:
				return act(p, gctx)
			case <-gctx.Done():
				return gctx.Err()
			}
		})
		if err := g.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// order places an order of something, and sends it again until there is an answer.
func (p *play) order(ctx context.Context) error {
	body, err := json.Marshal(map[string]any{"item": anyItem(), "quantity": 1 + mrand.IntN(5)})
	if err != nil {
		return err
	}
	url := p.api + "/orders/" + newUUID()
	return p.Until(ctx, "an order is placed", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, url, bytes.NewReader(body))
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode >= 300 {
			err = fmt.Errorf("%s: %s", resp.Status, text)
		}
		return err
	})
}

func anyItem() string {
	n := mrand.IntN(len(stock))
	for item := range stock {
		if n == 0 {
			return item
		}
		n--
	}
	panic("no item")
}

func newUUID() string {
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
