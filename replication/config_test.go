package replication

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/outboxdb"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestTheSecondConnectionFollowsTheFirst(t *testing.T) {
	t.Parallel()
	var dialled []string
	lookups := 0
	config := func() *pgconn.Config {
		return &pgconn.Config{
			DialFunc: func(_ context.Context, network, addr string) (net.Conn, error) {
				dialled = append(dialled, network+" "+addr)
				return nil, nil
			},
			LookupFunc: func(context.Context, string) ([]string, error) {
				lookups++
				return []string{fmt.Sprint("10.0.0.", lookups)}, nil
			},
		}
	}
	pin, first, second := &hostPin{known: map[string][]string{}}, config(), config()
	pin.lead(first)
	pin.follow(second)
	ctx := t.Context()
	for _, c := range []*pgconn.Config{first, second} {
		if a, err := c.LookupFunc(ctx, "pg"); err != nil || !slices.Equal(a, []string{"10.0.0.1"}) {
			t.Errorf("pg is %v, %v", a, err)
		}
	}
	first.DialFunc(ctx, "tcp", "10.0.0.1:5432")
	first.DialFunc(ctx, "tcp", "10.0.0.2:5432") // the first did not answer
	if _, err := second.DialFunc(ctx, "tcp", "10.0.0.1:5432"); err == nil {
		t.Error("the second connection goes elsewhere")
	}
	if _, err := second.DialFunc(ctx, "tcp", "10.0.0.2:5432"); err != nil {
		t.Error(err)
	}
	if want := []string{"tcp 10.0.0.1:5432", "tcp 10.0.0.2:5432", "tcp 10.0.0.2:5432"}; !slices.Equal(dialled,
		want) {
		t.Errorf("dialled %v, want %v", dialled, want)
	}
}

// With several hosts both connections end at the first that answers, also where names and addresses differ,
// and where one before it takes connections and ends them.
func TestBothConnectionsEndAtTheFirstHostThatAnswers(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	u, err := url.Parse(d.URL)
	must.Succeed(t, err)
	port := u.Port()
	ends, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer ends.Close()
	go func() {
		for {
			conn, err := ends.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	d.cfg.URL = fmt.Sprintf("host=127.0.0.1,127.0.0.1,localhost,127.0.0.1 port=1,%d,%s,%s user=%s dbname=%s "+
		"sslmode=prefer target_session_attrs=read-write keepalives_idle=3",
		ends.Addr().(*net.TCPAddr).Port, port, port, u.User.Username(), strings.Trim(u.Path, "/"))
	s := d.start(0)
	if _, err := s.Server(within(t)); err != nil {
		t.Error(err)
	}
	d.Insert(outboxdb.Ops(t, 1))
	read(t, s, inserts(1))
}

// What is set for the role, the database or in the URL does not change how values are printed.
func TestSettingsOfTheRoleDoNotChangeHowValuesPrint(t *testing.T) {
	t.Parallel()
	d := ready(t, pgtest.Server(t))
	name := d.Text("SELECT quote_ident(current_database())")
	for _, set := range []string{"DateStyle = 'German'", "TimeZone = 'Asia/Tokyo'", "bytea_output = 'escape'",
		"extra_float_digits = -10", "IntervalStyle = 'iso_8601'"} {
		d.Exec("ALTER DATABASE " + name + " SET " + set)
	}
	d.Exec("ALTER TABLE outbox ADD at timestamptz, ADD raw bytea, ADD weight float8, ADD span interval")
	d.cfg.URL += map[bool]string{true: "&", false: "?"}[strings.Contains(d.URL, "?")] +
		"datestyle=German&timezone=Asia/Tokyo"
	s := d.start(0)
	d.Exec(`INSERT INTO outbox (doc_id, actor_id, counter, payload, at, raw, weight, span)
		VALUES ('d', 'a', 1, '{}', '2024-02-03 04:05:06.789+00', '\x00ff', 0.1::float8 + 0.2::float8,
		'1 day 02:00')`)
	all := read(t, s, inserts(1))
	s.Close()
	eventually(t, "the slot is free", func() bool {
		return Peek(within(t), d.config(), 0, func(m Message) error { all.add(m); return nil }) == nil
	})
	if len(all.inserts) != 2 {
		t.Fatalf("%d inserts from stream and peek", len(all.inserts))
	}
	for _, got := range all.inserts {
		for _, want := range []string{"2024-02-03 04:05:06.789+00", `\x00ff`, "0.30000000000000004",
			"1 day 02:00:00"} {
			if !strings.Contains(got, want) {
				t.Errorf("%q does not hold %s", got, want)
			}
		}
	}
}
