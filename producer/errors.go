package producer

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
)

// Invalid is an event that was refused before anything was sent: the transaction is as it was, and can go on.
type Invalid struct {
	Index   int    // which of the call's events, from 0
	Field   string // of Event, such as Payload or Columns["event_type"]
	Value   string // what it is, the beginning of it
	Problem string // what is wrong with it
	Hint    string // what to do

	taken bool
	table bool // it may be the table's columns that are not as they were
}

// Error names the event, the field, its value and the hint.
func (e *Invalid) Error() string {
	return fmt.Sprintf("producer: event %d: %s %s: %s. %s", e.Index, e.Field, e.Value, e.Problem, e.Hint)
}

// Unwrap returns [ErrTaken] where that is the problem.
func (e *Invalid) Unwrap() error {
	if e.taken {
		return ErrTaken
	}
	return nil
}

// ErrTaken is wrapped by the error of an event whose counter, id or key another event of the table has
// already, where a unique constraint says so, or another event of the same call. In the first case the
// transaction has failed.
var ErrTaken = errors.New("taken before")

// shown is the beginning of a value, for an error.
func shown(value string) string {
	const most = 60
	if len(value) <= most {
		return fmt.Sprintf("%q", value)
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(value[cut]) {
		cut--
	}
	return fmt.Sprintf("%q… (%d bytes)", value[:cut], len(value))
}

// SQLSTATEs of errors for which there is a hint.
const (
	stateUnique     = "23505"
	stateNotNull    = "23502"
	stateNoTable    = "42P01"
	stateNoColumn   = "42703"
	stateOtherType  = "42804"
	stateGenerated  = "428C9"
	stateNoRight    = "42501"
	stateSerialize  = "40001"
	stateDeadlock   = "40P01"
	stateAborted    = "25P02"
	stateCannotCast = "42846"
)

// failed explains why the statement failed: the transaction is aborted. What was read of the table is
// forgotten where that may be the reason.
func (o *Outbox) failed(doing string, l *layout, events []Event, err error) error {
	var coded interface{ SQLState() string } // pgx and lib/pq have it
	if !errors.As(err, &coded) {
		return fmt.Errorf("producer: %s: %w", doing, err)
	}
	hint := ""
	switch coded.SQLState() {
	case stateUnique:
		return o.taken(doing, l, events, err)
	case stateNotNull:
		hint = "Give it in Columns of every event, or give the column a default"
	case stateNoTable, stateNoColumn, stateOtherType, stateGenerated, stateCannotCast:
		o.layout.Store(nil)
		hint = "The table has changed, or a table is missing; the next call reads it again. Roll back and " +
			"try again" + o.counterCure()
	case stateNoRight:
		hint = "The role needs INSERT on the table and SELECT on its id column" + o.counterRight()
	case stateSerialize, stateDeadlock:
		hint = "Roll back and run the whole transaction again"
	case stateAborted:
		hint = "An earlier statement of this transaction failed. Roll back"
	}
	if hint != "" {
		hint = ". " + hint
	}
	return fmt.Errorf("producer: %s: %w%s", doing, err, hint)
}

func (o *Outbox) counterCure() string {
	if !o.cfg.NextCounter {
		return ""
	}
	return "; `outflow init --sql-api` makes " + o.counter.quoted()
}

func (o *Outbox) counterRight() string {
	if !o.cfg.NextCounter {
		return ""
	}
	return ", and SELECT, INSERT and UPDATE on " + o.counter.quoted()
}

// taken names the event that a unique constraint refused, if the server says its values.
func (o *Outbox) taken(doing string, l *layout, events []Event, err error) error {
	which, hint := "an event", "Roll back. Count on from the actor's last counter, or let NextCounter count"
	var detailed *pgconn.PgError
	if errors.As(err, &detailed) {
		if i, ok := l.find(detailed.Detail, events); ok {
			e := &events[i]
			which = fmt.Sprintf("event %d (Document %s, Actor %s, Counter %d, ID %s)",
				i, shown(e.Document), shown(e.Actor), e.Counter, shown(e.ID))
		}
		if detailed.TableName == o.counter.table {
			hint = "Roll back and try again"
		}
		err = fmt.Errorf("%w (%s)", err, detailed.Detail)
	}
	return fmt.Errorf("producer: %s: %s was %w: %w. %s", doing, which, ErrTaken, err, hint)
}

// find returns the event that has the values of an error's detail, such as
//
//	Key (doc_id, actor_id, counter)=(note, alice, 7) already exists.
func (l *layout) find(detail string, events []Event) (int, bool) {
	columns, values, ok := strings.Cut(detail, ")=(")
	if !ok || l == nil {
		return 0, false
	}
	names := strings.Split(strings.TrimPrefix(columns, "Key ("), ", ")
	for i := range events {
		var own []string
		for _, name := range names {
			own = append(own, l.text(strings.Trim(name, `"`), &events[i]))
		}
		if strings.HasPrefix(values, strings.Join(own, ", ")+")") {
			return i, true
		}
	}
	return 0, false
}
