package config

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// One line of the file switches the mode: what belongs to the other mode may stay, and has no effect.
func TestTheModeDecidesWhichSettingsAreInForce(t *testing.T) {
	t.Parallel()
	const both = "{horizon: 50ms, sort: commit, bound: 5s, cold: 1ms, memory: 100, first_counter: 0, " +
		"gap_scope: document, max_events: 10, max_bytes: 20"
	for _, c := range []struct {
		text string
		want relay.Settings
	}{
		{both + "}", relay.Settings{Horizon: 50 * time.Millisecond, Sort: outbox.ByCommit, MaxEvents: 10,
			MaxBytes: 20}},
		{both + ", mode: horizon}", relay.Settings{Horizon: 50 * time.Millisecond, Sort: outbox.ByCommit,
			MaxEvents: 10, MaxBytes: 20}},
		{both + ", mode: gap}", relay.Settings{Sort: outbox.ByGap, MaxEvents: 10, MaxBytes: 20,
			Gap: relay.Gap{Bound: 5 * time.Second, Cold: time.Millisecond, Memory: 100, First: 0,
				Scope: relay.OfDocument}}},
		{"{mode: gap}", relay.Settings{Sort: outbox.ByGap, MaxEvents: relay.DefaultMaxEvents,
			MaxBytes: relay.DefaultMaxBytes,
			Gap: relay.Gap{Bound: relay.DefaultBound, Cold: relay.DefaultCold,
				Memory: relay.DefaultMemory, First: relay.DefaultFirst, Scope: relay.OfSequence}}},
	} {
		cfg, err := loadText(t, "reorder: "+c.text)
		must.Succeed(t, err)
		got := cfg.Reorder.Settings()
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.text, got, c.want)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}

func TestTheSettingsOfTheOtherModeAreChecked(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"{bound: 1ms, cold: 2ms}", "{memory: 0}", "{mode: gap, horizon: 25h}"} {
		if _, err := loadText(t, "reorder: "+text); outbox.ClassOf(err) != outbox.Usage {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestGapModeNeedsACounter(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"table", "message", "both"} {
		_, err := Load(Args{"source": source, "reorder.mode": "gap", "columns.counter": ""}, nil)
		if outbox.ClassOf(err) != outbox.Usage || !strings.Contains(err.Error(), "columns.counter") ||
			!strings.Contains(err.Error(), "reorder.mode") {
			t.Errorf("source %s without a counter: %v", source, err)
		}
	}
	without, with := []string{"doc_id", "payload"}, []string{"doc_id", "counter", "payload"}
	for _, c := range []struct {
		args  Args
		table []string
		code  string
	}{
		{Args{"reorder.mode": "gap"}, without, "counter_missing"},
		{Args{"reorder.mode": "gap", "columns.counter": "n"}, without, "column_missing"},
		{Args{"reorder.mode": "gap", "source": "both"}, without, "counter_missing"},
		{Args{"reorder.mode": "gap"}, with, ""},
		{Args{"reorder.mode": "gap", "source": "message"}, nil, ""},
		{Args{}, without, ""},
	} {
		cfg, err := Load(c.args, nil)
		must.Succeed(t, err)
		_, err = ResolveMapping(cfg, c.table, nil)
		if f := outbox.FaultOf(err); c.code == "" && err != nil || c.code != "" &&
			(f == nil || f.Code != c.code || f.Class != outbox.Fatal || f.Hint == "") {
			t.Errorf("%v, table %v: %v, want %q", c.args, c.table, err, c.code)
		}
	}
}

// Before there was a span, a table might have a column of that name: it is one only where it is named.
func TestASpanIsMappedOnlyWhereItIsNamed(t *testing.T) {
	t.Parallel()
	table := []string{"doc_id", "counter", "span", "payload"}
	for _, c := range []struct {
		args  Args
		table []string
		want  string
		extra string
	}{
		{Args{}, table, "", ""},
		{Args{"columns.span": "span"}, table, "span", ""},
		{Args{"columns.span": "length"}, append(table, "length"), "length", ""},
		{Args{"columns.span": "length", "headers": "Length=length"}, append(table, "length"), "length",
			"length"},
		{Args{"columns.span": "length", "headers": "Length=span"}, []string{"doc_id", "length", "payload"},
			"length", "length"},
		{Args{"source": "message"}, nil, "", ""},
		{Args{"source": "message", "columns.span": "length", "headers": "Length=length"}, nil, "span",
			"span"},
	} {
		cfg, err := Load(c.args, nil)
		must.Succeed(t, err)
		r, err := ResolveMapping(cfg, c.table, nil)
		must.Succeed(t, err)
		if r.Mapping.Span != c.want || strings.Join(r.Extra, " ") != c.extra {
			t.Errorf("%v: span %q, extra %q", c.args, r.Mapping.Span, r.Extra)
		}
	}
	cfg, err := Load(Args{"columns.span": "length"}, nil)
	must.Succeed(t, err)
	var f *outbox.Fault
	if _, err := ResolveMapping(cfg, table, nil); !errors.As(err, &f) || f.Code != "column_missing" {
		t.Errorf("a span that the table lacks: %v", err)
	}
}
