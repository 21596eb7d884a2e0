package main

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

const run = `{"Action":"start","Package":"github.com/outflowhq/outflow/sink"}
{"Action":"run","Package":"github.com/outflowhq/outflow/sink","Test":"TestA"}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Test":"TestA","Output":"retry: TestA: [init]: nats: timeout\n"}
{"Action":"pass","Package":"github.com/outflowhq/outflow/sink","Test":"TestA","Elapsed":0.5}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Test":"TestB","Output":"    b_test.go:7: the stream has 3 messages\n"}
{"Action":"fail","Package":"github.com/outflowhq/outflow/sink","Test":"TestB","Elapsed":7.25}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Test":"TestC","Output":"    c_test.go:9: psql is not here\n"}
{"Action":"skip","Package":"github.com/outflowhq/outflow/sink","Test":"TestC","Elapsed":0}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Test":"TestD","Output":"goroutine 7 [chan receive, 15 minutes]:\n"}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Output":"standstill: 2s\n"}
{"Action":"output","Package":"github.com/outflowhq/outflow/sink","Output":"cpu: 12.5 s\n"}
{"Action":"fail","Package":"github.com/outflowhq/outflow/sink","Elapsed":9}
go: downloading something
{"ImportPath":"github.com/outflowhq/outflow/broken","Action":"build-output","Output":"x.go:1:1: expected package\n"}
{"ImportPath":"github.com/outflowhq/outflow/broken","Action":"build-fail"}
`

func TestARunIsSummedUp(t *testing.T) {
	t.Parallel()
	r := newReport()
	var out strings.Builder
	must.Succeed(t, r.read(strings.NewReader(run), &out))
	r.print(&out)
	if want := []string{"sink TestB", "sink TestD", "sink", "broken"}; !slices.Equal(r.failed, want) {
		t.Errorf("failed: %v, want %v", r.failed, want)
	}
	if names := r.skipped["psql is not here"]; !slices.Equal(names, []string{"sink TestC"}) {
		t.Errorf("skipped: %v", r.skipped)
	}
	if r.passed != 1 || len(r.marks["retry"]) != 1 || len(r.marks["standstill"]) != 1 ||
		r.times[0].name != "sink TestB" {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(out.String(), "9.0 s    12.5 s of CPU\n") {
		t.Errorf("no CPU time of sink:\n%s", out.String())
	}
	_, failed, _ := strings.Cut(out.String(), "== failed")
	for _, want := range []string{"the stream has 3 messages", "expected package", "15 minutes"} {
		if !strings.Contains(failed, want) {
			t.Errorf("the end does not say %q:\n%s", want, out.String())
		}
	}
}

func TestRunsBesideEachOtherAreOneReport(t *testing.T) {
	t.Parallel()
	r := newReport()
	var out strings.Builder
	first, lines := io.Pipe()
	read := make(chan error)
	go func() { read <- r.read(first, &out) }()
	for line := range strings.Lines(run) {
		_, err := lines.Write([]byte(line))
		must.Succeed(t, err)
		must.Succeed(t, r.read(strings.NewReader(strings.ReplaceAll(line, "/sink", "/decoder")), &out))
	}
	must.Succeed(t, lines.Close())
	must.Succeed(t, <-read)
	if r.passed != 2 || r.cpu[module+"sink"] == "" || r.cpu[module+"decoder"] == "" {
		t.Errorf("passed %d, cpu %v", r.passed, r.cpu)
	}
}
