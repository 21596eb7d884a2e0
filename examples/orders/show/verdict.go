package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

const stream = "SHOP"

// verdict is what database and stream have in the end. All but the first line of it ought to be 0.
type verdict struct {
	orders, reserved, refused int

	notPlaced    int // orders that a customer has an answer for, and the shop has not
	without      int // orders without a reservation's row
	twice        int // rows of a reservation beyond the first of its order
	stockWrong   int // items of which there is not what there was less what is reserved
	answersWrong int // orders without exactly one answer in the stream, or with another one than the row
}

func (v verdict) good() bool {
	return v.notPlaced == 0 && v.without == 0 && v.twice == 0 && v.stockWrong == 0 && v.answersWrong == 0
}

func (v verdict) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nverdict: %d orders, %d reserved, %d refused for want of stock\n", v.orders, v.reserved,
		v.refused)
	for _, l := range []struct {
		n    int
		text string
	}{
		{v.notPlaced, "orders that were accepted and are not there"},
		{v.without, "orders that nothing was decided on"},
		{v.twice, "orders that stock was reserved for twice"},
		{v.stockWrong, "items whose stock is not what there was less what is reserved"},
		{v.answersWrong, "orders without exactly one answer in the stream"},
	} {
		fmt.Fprintf(&b, "  %6d  %s\n", l.n, l.text)
	}
	return b.String()
}

// answered waits for as many answers in the stream as there are orders. (More would be an error, which the
// verdict finds.)
func (p *play) answered(ctx context.Context) error {
	s, err := p.JS.Stream(ctx, stream)
	if err != nil {
		return err
	}
	if got := s.CachedInfo().State.LastSeq; got < uint64(2*p.orders) {
		return fmt.Errorf("%d messages of %d", got, 2*p.orders)
	}
	return nil
}

func (p *play) judge(ctx context.Context) (v verdict, err error) {
	const sql = `SELECT count(*), count(*) FILTER (WHERE reserved), count(*) FILTER (WHERE NOT reserved),
		(SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT FROM reservation r WHERE r.order_id = o.id)),
		count(*) - count(DISTINCT order_id), (SELECT count(*) FROM orders) FROM reservation`
	var rows, orders int
	if err := p.DB.QueryRow(ctx, sql).Scan(&rows, &v.reserved, &v.refused, &v.without, &v.twice,
		&orders); err != nil {
		return v, err
	}
	v.orders, v.notPlaced = orders, p.orders-orders
	for item, initial := range stock {
		var left, taken int
		err := p.DB.QueryRow(ctx, `SELECT available, (SELECT coalesce(sum(quantity), 0) FROM reservation r
			WHERE r.item = s.item AND reserved)
			FROM stock s WHERE item = $1`, item).Scan(&left, &taken)
		if err != nil {
			return v, err
		}
		if left != initial-taken {
			v.stockWrong++
		}
	}
	v.answersWrong, err = p.judgeAnswers(ctx)
	return v, err
}

// judgeAnswers compares the answers in the stream with the rows.
func (p *play) judgeAnswers(ctx context.Context) (wrong int, err error) {
	want := map[string]string{}
	rows, err := p.DB.Query(ctx, "SELECT order_id::text, CASE WHEN reserved THEN 'reserved.' ELSE "+
		"'refused.' END || item FROM reservation")
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var id, topic string
		if err := rows.Scan(&id, &topic); err != nil {
			return 0, err
		}
		want[id] = "shop." + topic
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	s, err := p.JS.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		if err != nil {
			return 0, fmt.Errorf("message %d: %w", seq, err)
		}
		if strings.HasPrefix(m.Subject, "shop.orders.") {
			continue
		}
		if !isAnswer(want, m) {
			wrong++
		}
	}
	return wrong + len(want), nil // what is left had no answer
}

// isAnswer takes an order off the list if the message is its answer.
func isAnswer(want map[string]string, m *jetstream.RawStreamMsg) bool {
	var o struct{ Order string }
	if json.Unmarshal(m.Data, &o) != nil || want[o.Order] != m.Subject {
		return false
	}
	delete(want, o.Order)
	return true
}
