package alerts

import (
	"fmt"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// TestARecordingIsPlayedByTheClockOfItsScrapes: what happened halfway between two scrapes is played halfway
// between them, however far apart they were, and what nobody answered to is missing.
func TestARecordingIsPlayedByTheClockOfItsScrapes(t *testing.T) {
	t.Parallel()
	r := NewRecorder([]Rule{{Expr: "outflow_a_timestamp_seconds < outflow_total"}})
	begin := time.Unix(1_000_000, 0)
	for i, s := range []struct {
		at    int // seconds, of the scrape
		stamp float64
		other string // what the other instance answers
	}{{0, -2, ""}, {1, 0.5, "outflow_total 1"}, {5, 3, "outflow_total 2"}, {6, 6, "outflow_other 3"},
		{7, 6, ""}, {8, 6, "outflow_total 1e+06"}} {
		if i == 2 {
			r.Mark("it's here")
		}
		page := fmt.Sprintf("# HELP outflow_total x\noutflow_total{b=\"1 2\"} %d\n"+
			"outflow_a_timestamp_seconds %f\n", 7+2*i, 1e6+s.stamp)
		pages := map[string]string{`i="a"`: page}
		if s.other != "" {
			pages[`i="b"`] = s.other + "\n"
		}
		must.Succeed(t, r.Scrape(begin.Add(time.Duration(s.at)*time.Second), pages))
	}
	want := Recording{
		Marks: []Mark{{30 * time.Second, "it's here"}, {90 * time.Second, "the end"}},
		Series: []Series{
			{`outflow_a_timestamp_seconds{i="a"}`, "-30 8 23 45x2"},
			{`outflow_total{i="a",b="1 2"}`, "7+2x5"},
			{`outflow_total{i="b"}`, "_x1 1 2 stale _x1 1000000"},
		},
	}
	got := r.Recording()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	path := filepath.Join(t.TempDir(), "r.yaml")
	must.Succeed(t, got.Write(path))
	if read, err := Read(path); err != nil || !reflect.DeepEqual(read, want) {
		t.Errorf("%+v, %v, want %+v", read, err, want)
	}
}
