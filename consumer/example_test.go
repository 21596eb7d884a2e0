package consumer_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/consumertest"
	"github.com/outflowhq/outflow/outbox"
)

// handle runs a handler over events, with stream and offsets in memory. It returns why one of them failed.
func handle(cfg consumer.Config, h consumer.Handler, events ...consumertest.Event) (failed error) {
	ctx, stop := context.WithCancel(context.Background())
	stream := consumertest.NewStream()
	last := stream.Add(events...)
	cfg.Log = slog.New(slog.DiscardHandler)
	cfg.OnPoison = func(_ context.Context, _ *consumer.Event, cause error) error {
		failed = cause
		stop()
		return nil
	}
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), cfg)
	if err != nil {
		return err
	}
	err = c.Run(ctx, func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
		err := h(ctx, tx, e)
		if err == nil && e.Sequence == last {
			stop()
		}
		return err
	})
	return cmp.Or(err, failed)
}

// New says what can't be meant, such as a filter that no subject matches.
func ExampleNew() {
	var js jetstream.JetStream // of your connection to NATS
	_, err := consumer.New(js, consumer.JetStream(), consumer.Config{
		Name: "accounts", Subject: "outbox.{kind}.{doc_id}", Filters: []string{"outbox.acct-*"},
	})
	fmt.Println(strings.Contains(err.Error(), "can match nothing"))
	_, err = consumer.New(js, consumer.JetStream(), consumer.Config{
		Name: "accounts", Subject: "outbox.{kind}.{doc_id}", Filters: []string{"outbox.acct.*"},
	})
	fmt.Println(err)
	// Output:
	// true
	// consumer: no JetStream context
}

// A row that Outflow could not publish comes as a dead letter, whose data is not the payload. It never
// reaches the handler.
func ExampleConfig_deadLetters() {
	var told string
	cfg := consumer.Config{Name: "usage"}
	cfg.DeadLetters = func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		told = fmt.Sprintf("a row of %s could not be published: %s", e.Document, e.DeadLetter)
		return nil
	}
	err := handle(cfg, consumer.Skip,
		consumertest.Event{Data: []byte(`{"doc_id": "note"}`),
			Header: nats.Header{"Outflow-Dead-Letter": {"too_large"}}},
		consumertest.Event{Document: "note"})
	fmt.Println(told, err)
	// Output:
	// a row of note could not be published: too_large <nil>
}

// Each document's events come in their order. A service reads a JetStream stream with [consumer.New] and
// gives it consumer.Postgres(pool); here the stream and the offsets are in memory.
func ExampleConsumer_Run() {
	stream := consumertest.NewStream()
	stream.Add(
		consumertest.Event{Document: "note", Data: []byte("hello")},
		consumertest.Event{Document: "note", Data: []byte(", world")},
	)
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(),
		consumer.Config{Name: "texts", Stream: "OUTBOX"})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	text := ""
	err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if text += string(e.Data); strings.HasSuffix(text, "world") {
			stop() // as a signal would
		}
		return nil
	})
	fmt.Println(text, err)
	// Output:
	// hello, world <nil>
}

// The shortest program: addresses from the environment, an end by a signal. count adds up the characters of
// each document, exactly once.
func ExampleMain() {
	type edit struct{ Text string }
	count := func(ctx context.Context, tx pgx.Tx, e *consumer.Event, edit edit) error {
		_, err := tx.Exec(ctx, "UPDATE usage SET n = n + $2 WHERE doc_id = $1", e.Document, len(edit.Text))
		return err
	}
	os.Unsetenv("DATABASE_URL")
	err := consumer.Main(context.Background(), consumer.Config{Name: "usage"}, consumer.JSON(count))
	fmt.Println(errors.Is(err, consumer.ErrSetup), outbox.FaultOf(err).Message)
	// Output:
	// true consumer: DATABASE_URL is not set
}

// Each type of event has a handler, which gets its payload decoded.
func ExampleMux() {
	type movement struct{ Quantity int }
	stock := 0
	add := func(sign int) consumer.Handler {
		return consumer.JSON(func(_ context.Context, _ pgx.Tx, _ *consumer.Event, m movement) error {
			stock += sign * m.Quantity
			return nil
		})
	}
	mux := consumer.Mux{
		Types:   map[string]consumer.Handler{"received": add(1), "shipped": add(-1)},
		Unknown: consumer.Skip, // such as "inspected"; without it they are parked
	}
	err := handle(consumer.Config{Name: "stock"}, mux.Handle,
		consumertest.Event{Document: "tea", Type: "received", Data: []byte(`{"quantity": 12}`)},
		consumertest.Event{Document: "tea", Type: "inspected", Data: []byte(`{}`)},
		consumertest.Event{Document: "tea", Type: "shipped", Data: []byte(`{"quantity": 5}`)},
	)
	fmt.Println(stock, err)
	// Output:
	// 7 <nil>
}

// A payload that is no JSON of the type is Poison.
func ExampleJSON() {
	type edit struct{ Text string }
	text := ""
	err := handle(consumer.Config{Name: "texts"},
		consumer.JSON(func(_ context.Context, _ pgx.Tx, _ *consumer.Event, e edit) error {
			text += e.Text
			return nil
		}),
		consumertest.Event{Document: "note", Data: []byte(`{"text": "hello"}`)},
		consumertest.Event{Document: "note", Data: []byte(`"hello"`)},
	)
	fmt.Println(text)
	fmt.Println(err)
	// Output:
	// hello
	// decode the payload: json: cannot unmarshal string into Go value of type consumer_test.edit
}

// Middleware does what all events need: here it says how long each took.
func ExampleMiddleware() {
	timed := func(next consumer.Handler) consumer.Handler {
		return func(ctx context.Context, tx pgx.Tx, e *consumer.Event) error {
			begun := time.Now()
			err := next(ctx, tx, e)
			fmt.Println(e.Document, time.Since(begun) < time.Hour, err)
			return err
		}
	}
	err := handle(consumer.Config{Name: "texts", Use: []consumer.Middleware{timed}}, consumer.Skip,
		consumertest.Event{Document: "note"})
	fmt.Println(err)
	// Output:
	// note true <nil>
	// <nil>
}

// The event is tried again until it may have its effect. That counts as no attempt.
func ExampleRetryAfter() {
	calls := 0
	err := handle(consumer.Config{Name: "mails", MaxAttempts: 1},
		func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
			if calls++; calls < 4 {
				return consumer.RetryAfter(errors.New("too many mails in this second"), time.Millisecond)
			}
			fmt.Println("attempt", e.Attempt)
			return nil
		}, consumertest.Event{Document: "note"})
	fmt.Println(calls, "calls,", err)
	// Output:
	// attempt 1
	// 4 calls, <nil>
}

// A circuit breaker: what all events need is down, so the partition waits. State says so meanwhile.
func ExampleHalt() {
	down := true
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "note"})
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), consumer.Config{Name: "mails",
		Log: slog.New(slog.DiscardHandler), Partitions: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = c.Run(ctx, func(_ context.Context, _ pgx.Tx, e *consumer.Event) error {
		if down {
			if state := c.State(); len(state.Failing) > 0 { // it has failed before
				f := state.Failing[0]
				fmt.Println(state.Status, "held:", f.Held, "document:", f.Document, "error:", f.Err)
				down = false
			}
			return consumer.Halt(errors.New("no route to the mail server"))
		}
		stop()
		return nil
	})
	fmt.Println(err)
	// Output:
	// active held: true document: note error: no route to the mail server
	// <nil>
}

// An answer to a question for the service's health: not while the consumer can't work.
func ExampleConsumer_State() {
	c, err := consumertest.NewConsumer(consumertest.NewStream(), nil, consumer.Memory(),
		consumer.Config{Name: "usage"})
	if err != nil {
		fmt.Println(err)
		return
	}
	health := func(w http.ResponseWriter, _ *http.Request) {
		if err := c.State().Err; err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	}
	answer := httptest.NewRecorder()
	health(answer, nil)
	fmt.Println(answer.Code, answer.Body)
	// Output:
	// 503 consumer: Run was not called
}

// A service that uses database/sql, here with pgx's driver, has its effects exactly once as well.
func ExamplePostgresSQL() {
	db := stdlib.OpenDB(pgx.ConnConfig{}) // or sql.Open("pgx", os.Getenv("DATABASE_URL"))
	defer db.Close()
	count := func(ctx context.Context, _ pgx.Tx, e *consumer.Event) error {
		_, err := e.SQLTx().ExecContext(ctx, "UPDATE usage SET n = n + 1 WHERE doc_id = $1", e.Document)
		return err
	}
	var js jetstream.JetStream // of your connection to NATS
	c, err := consumer.New(js, consumer.PostgresSQL(db), consumer.Config{Name: "usage"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Run(context.Background(), count))
	// Output:
	// consumer: no JetStream context
}

// An event that no attempt can mend is given to OnPoison at once. With PostgreSQL it would be parked, with
// the later events of its document.
func ExamplePoison() {
	stream := consumertest.NewStream()
	stream.Add(consumertest.Event{Document: "note", Data: []byte("?")})
	ctx, stop := context.WithCancel(context.Background())
	c, err := consumertest.NewConsumer(stream, nil, consumer.Memory(), consumer.Config{
		Name: "texts", Stream: "OUTBOX",
		OnPoison: func(_ context.Context, e *consumer.Event, cause error) error {
			fmt.Printf("event %d of %s: %v, attempt %d\n", e.Sequence, e.Document, cause, e.Attempt)
			stop()
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = c.Run(ctx, func(context.Context, pgx.Tx, *consumer.Event) error {
		return consumer.Poison(errors.New("not a text"))
	})
	fmt.Println(err)
	// Output:
	// event 1 of note: not a text, attempt 1
	// <nil>
}

// The handler knows version 2 only; what was written before there were versions is brought to it.
func ExampleSchema() {
	schema := &consumer.Schema{
		Current: "2",
		From:    consumer.FieldVersion("version"),
		Missing: "1",
		Up: map[string]consumer.Up{"1": {To: "2", Do: func(data []byte) ([]byte, error) {
			return []byte(strings.Replace(string(data), `"text"`, `"inserted"`, 1)), nil
		}}},
	}
	data, err := schema.Upcast("1", []byte(`{"text": "hello"}`))
	fmt.Println(string(data), err)
	// Output:
	// {"inserted": "hello"} <nil>
}

// A cache by partition is filled and emptied as partitions come and go.
func ExampleConfig_onAssigned() {
	caches := map[int]map[string]int{}
	cfg := consumer.Config{
		Name: "sums", Partitions: 2,
		OnAssigned: func(_ context.Context, partitions []int) {
			for _, p := range partitions {
				caches[p] = map[string]int{}
			}
			fmt.Println("assigned", partitions)
		},
		OnRevoked: func(_ context.Context, partitions []int) {
			for _, p := range partitions {
				delete(caches, p)
			}
			fmt.Println("revoked", partitions, len(caches))
		},
	}
	err := handle(cfg, func(context.Context, pgx.Tx, *consumer.Event) error { return nil },
		consumertest.Event{Document: "d1", Data: []byte("{}")})
	fmt.Println(err)
	// Output:
	// assigned [0 1]
	// revoked [0 1] 0
	// <nil>
}

// Whoever is told of a parked event looks at its error to know whom to ask.
func ExampleConfig_onParked() {
	cfg := consumer.Config{
		Name: "orders",
		OnParked: func(_ context.Context, e *consumer.Event, cause error) {
			var refused *pgconn.PgError
			if errors.As(cause, &refused) {
				log.Printf("document %s is parked: constraint %q", e.Document, refused.ConstraintName)
				return
			}
			log.Printf("document %s is parked: %v", e.Document, cause)
		},
	}
	handler := func(context.Context, pgx.Tx, *consumer.Event) error { return nil }
	if err := consumer.Main(context.Background(), cfg, handler); err != nil {
		log.Fatal(err)
	}
}
