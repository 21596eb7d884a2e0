package archive_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/consumer"
	"github.com/outflowhq/outflow/consumer/archive"
)

// A new consumer begins at the first event that there ever was, although the stream keeps a day: it reads the
// archive, and then the stream.
func ExampleOpen() {
	folder, err := os.MkdirTemp("", "outflow-archive-") // archive.url of Outflow's configuration
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder) //nolint:errcheck // a left-over does no harm
	ctx := context.Background()
	past, err := archive.Open(ctx, "file://"+folder)
	if err != nil {
		log.Fatal(err)
	}
	defer past.Close()         //nolint:errcheck // it is only read
	var js jetstream.JetStream // of your connection to NATS
	var pool *pgxpool.Pool     // of your database
	_, err = consumer.New(js, consumer.Postgres(pool), consumer.Config{Name: "texts", Archive: past})
	fmt.Println(err)
	// Output:
	// consumer: no JetStream context
}
