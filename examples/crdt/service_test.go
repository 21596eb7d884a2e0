package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// newService is a service on a database of its own, without NATS: nothing that writes needs it.
func newService(t *testing.T) (address string, pool *pgxpool.Pool) {
	t.Helper()
	url := pgtest.Database(t, pgtest.Server(t))
	if err := setup(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	s, err := serviceParts(t.Context(), url, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s.handler())
	t.Cleanup(func() {
		server.Close()
		s.store.pool.Close()
		s.views.Close()
	})
	return server.URL, s.store.pool
}

func post(t *testing.T, url, match, body string) (status int, answer string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if match != "" {
		req.Header.Set("If-Match", match)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// op is an operation that inserts a word at the beginning.
func op(actor string, counter int, word string) string {
	b, err := json.Marshal(Op{Actor: actor, Counter: int64(counter), Update: []byte(word),
		Edits: []Edit{{Ins: word}}})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func TestTheServiceTakesAndListsOperations(t *testing.T) {
	t.Parallel()
	service, pool := newService(t)
	ops := service + "/docs/note/ops"
	for _, step := range []struct {
		what, match, body string
		status            int
		has               string
	}{
		{"the first two", "", "[" + op("a", 1, "x") + "," + op("a", 2, "y") + "]", 200, `"version":2`},
		{"both again", "", "[" + op("a", 1, "x") + "," + op("a", 2, "y") + "]", 200,
			`"version":2,"repeated":true`},
		{"one again, one new", "", "[" + op("a", 2, "y") + "," + op("a", 3, "z") + "]", 200, `"version":3`},
		{"a gap", "", "[" + op("a", 5, "w") + "]", 409, `"expected":4`},
		{"a gap in the request", "", "[" + op("b", 1, "x") + "," + op("b", 3, "x") + "]", 409,
			`"expected":2`},
		{"a counter that is taken", "", "[" + op("a", 3, "other") + "]", 409, "taken by another operation"},
		{"the same counter twice", "", "[" + op("a", 4, "v") + "," + op("a", 4, "u") + "]", 409,
			"taken by another operation"},
		{"made on an old version", `"1"`, "[" + op("b", 1, "x") + "]", 412, `"version":3`},
		{"made on an old version, but there", `"1"`, "[" + op("a", 1, "x") + "]", 200, `"repeated":true`},
		{"made on the version", `"3"`, "[" + op("b", 1, "x") + "]", 200, `"version":4`},
		{"no JSON", "", "[{", 400, "no JSON array"},
		{"nothing", "", "[]", 400, "want 1 to 500"},
		{"no actor", "", "[" + op("", 1, "x") + "]", 400, "actor"},
		{"counter 0", "", "[" + op("c", 0, "x") + "]", 400, "counter 0"},
		{"no update", "", `[{"actor":"c","counter":1}]`, 400, "update is missing"},
		{"an update that is no base64", "", `[{"actor":"c","counter":1,"update":"???"}]`, 400, "base64"},
		{"a negative position", "", `[{"actor":"c","counter":1,"update":"AA==","edits":[{"pos":-1}]}]`, 400,
			"negative"},
		{"a NUL", "", `[{"actor":"c","counter":1,"update":"AA==","edits":[{"ins":"\u0000"}]}]`, 400, "NUL"},
		{"a huge update", "", "[" + op("c", 1, strings.Repeat("x", maxUpdate+1)) + "]", 400,
			"split the operation"},
		{"a huge request", "", "[" + strings.Repeat(" ", maxBody) + op("c", 1, "x") + "]", 400, "too large"},
		{"no version", `"x"`, "[" + op("c", 1, "x") + "]", 400, "If-Match"},
	} {
		status, answer := post(t, ops, step.match, step.body)
		if status != step.status || !strings.Contains(answer, step.has) {
			t.Errorf("%s: %d %s, want %d with %s", step.what, status, answer, step.status, step.has)
		}
	}

	// Each stored operation has one event, in the order of the versions; what was refused has left nothing.
	var got string
	err := pool.QueryRow(t.Context(),
		`SELECT string_agg(actor_id || counter || '=' || (payload->>'version'), ' ' ORDER BY id) FROM outbox`).Scan(&got)
	if err != nil {
		t.Fatal(err)
	}
	if want := "a1=1 a2=2 a3=3 b1=4"; got != want {
		t.Errorf("the outbox has %s, want %s", got, want)
	}
}

// TestManyWritersLeaveNoGapInTheVersions: whoever writes at the same time, versions have no gap, and the
// outbox has them in their order.
func TestManyWritersLeaveNoGapInTheVersions(t *testing.T) {
	t.Parallel()
	service, pool := newService(t)
	const writers, each = 6, 15
	done := make(chan string, writers)
	for w := range writers {
		go func() {
			for n := 1; n <= each; n++ {
				actor := fmt.Sprintf("w%d", w)
				if status, answer := post(t, service+"/docs/note/ops", "", "["+op(actor, n, "x")+
					"]"); status != http.StatusOK {
					done <- fmt.Sprintf("%s %d: %d %s", actor, n, status, answer)
					return
				}
			}
			done <- ""
		}()
	}
	for range writers {
		if failure := <-done; failure != "" {
			t.Fatal(failure)
		}
	}
	var n, least, most, inOrder int
	err := pool.QueryRow(t.Context(), `SELECT count(*), min(v), max(v), count(*) FILTER (WHERE v = place)
		FROM (SELECT (payload->>'version')::int AS v, row_number() OVER (ORDER BY id) AS place FROM outbox) o`).Scan(&n, &least, &most, &inOrder)
	if err != nil {
		t.Fatal(err)
	}
	if n != writers*each || least != 1 || most != n || inOrder != n {
		t.Errorf("%d events, versions %d to %d, %d in their order", n, least, most, inOrder)
	}
}

func TestEditsAreAppliedAndPricedByCharacter(t *testing.T) {
	t.Parallel()
	text := apply([]rune("añb🙂c"), []Edit{{Pos: 3, Del: 1, Ins: "::"}, {Pos: 0, Del: 1},
		{Pos: 99, Del: 5, Ins: "!"}, {Pos: 4, Del: 99}})
	if got, want := string(text), "ñb::"; got != want {
		t.Errorf("the text is %q, want %q", got, want)
	}
	m := meter{}
	var owed []int64
	for _, o := range []Op{
		{Actor: "ada~1", Edits: []Edit{{Ins: strings.Repeat("x", tierLong)}}},
		{Actor: "ada~2", Edits: []Edit{{Ins: "ñ"}}},
		{Actor: "grace", Edits: []Edit{{Del: 2}, {Ins: "yy"}}},
	} {
		owed = append(owed, m.charge(&o))
	}
	want := fmt.Sprint([]int64{pricePerTurn + tierLong*priceShort, priceLong, pricePerTurn + 2*priceShort})
	if fmt.Sprint(owed) != want || m.turns != 2 {
		t.Errorf("owed %v in %d turns, want %s in 2", owed, m.turns, want)
	}
}
