package producer

import (
	"context"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

const (
	traceOfCall = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	otherTrace  = "00-11111111111111111111111111111111-2222222222222222-00"
)

func TestTheTraceContextOfACallIsInItsEvents(t *testing.T) {
	t.Parallel()
	both := map[string]string{"traceparent": traceOfCall, "tracestate": "a=1"}
	mapped := map[string]string{"Traceparent": "trace", "tracestate": "state", "Event-Type": "type"}
	traced := map[string]any{"trace": traceOfCall}
	for name, c := range map[string]struct {
		headers, carrier map[string]string
		given, want      map[string]any
	}{
		"both": {mapped, both, nil, map[string]any{"trace": traceOfCall, "state": "a=1"}},
		"beside others": {mapped, both, map[string]any{"type": "x"},
			map[string]any{"type": "x", "trace": traceOfCall, "state": "a=1"}},
		"no column for the state": {map[string]string{"traceparent": "trace"}, both, nil, traced},
		"no state":                {mapped, map[string]string{"traceparent": traceOfCall}, nil, traced},
		"nothing":                 {mapped, nil, nil, nil},
		"its own": {mapped, both, map[string]any{"trace": otherTrace},
			map[string]any{"trace": otherTrace, "state": nil}},
		"its own, whatever it is": {mapped, both, map[string]any{"trace": "x", "state": "y"},
			map[string]any{"trace": "x", "state": "y"}},
		"none of its own": {mapped, both, map[string]any{"trace": nil},
			map[string]any{"trace": nil, "state": nil}},
		"not valid": {mapped, map[string]string{"traceparent": "00-x", "tracestate": "a=1"}, nil, nil},
		"a state that is too long": {mapped, map[string]string{"traceparent": traceOfCall,
			"tracestate": strings.Repeat("a", 513)}, nil, traced},
		"a state with a line feed": {mapped, map[string]string{"traceparent": traceOfCall,
			"tracestate": "a=1\nX: y"}, nil, traced},
	} {
		type key struct{}
		ctx := context.WithValue(t.Context(), key{}, c.carrier)
		o, err := New(Config{Headers: c.headers, Inject: func(ctx context.Context, to map[string]string) {
			maps.Copy(to, ctx.Value(key{}).(map[string]string))
		}})
		must.Succeed(t, err)
		kept := maps.Clone(c.given)
		got := o.traced(ctx, []Event{{Columns: c.given}, {Columns: c.given}})
		if !reflect.DeepEqual(got[0].Columns, c.want) || !reflect.DeepEqual(got[1].Columns, c.want) ||
			!reflect.DeepEqual(c.given, kept) {
			t.Errorf("%s: %v, want %v; the caller's is %v", name, got, c.want, c.given)
		}
	}
}

func TestInjectNeedsAColumn(t *testing.T) {
	t.Parallel()
	_, err := New(Config{Headers: map[string]string{"tracestate": "state"},
		Inject: func(context.Context, map[string]string) {}})
	if err == nil || !strings.Contains(err.Error(), "Headers has no traceparent") {
		t.Error(err)
	}
}
