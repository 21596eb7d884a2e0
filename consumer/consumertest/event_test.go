package consumertest

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func TestLinesReadsOperationsAndReplays(t *testing.T) {
	t.Parallel()
	got, err := Lines(strings.NewReader(`{"doc_id": "a", "actor_id": "alice", "counter": 7, "op": [[1, 0, "x"]], "t": 3}

{"doc_id": "b", "id": "i", "seq_key": "k", "headers": {"schema_version": "2"}, "payload": {"n": 9007199254740993}}
{"sequence":9,"subject":"outbox.a=2Eb","headers":{"Outflow":["v=1"],"Event-Type":["put"],"Nats-Expected-Last-Sequence":["8"],` +
		`"Nats-Expected-Last-Subject-Sequence":["7"],"Nats-Expected-Last-Subject-Sequence-Subject":["cut"]},` +
		`"position":"0/1-0","document":"a.b","id":"i","key":"k","time":"2026-01-02T03:04:05Z","data":{"a": 1}}
{"subject":"outbox.c","document":"c","headers":{},"id":"","key":"","data_base64":"/w=="}`))
	want := []Event{
		{Document: "a", Key: "alice:00000000000000000007", Data: []byte(`[[1, 0, "x"]]`),
			Header: nats.Header{}},
		{Document: "b", ID: "i", Key: "k", Data: []byte(`{"n": 9007199254740993}`),
			Header: nats.Header{"schema_version": {"2"}}},
		{Document: "a.b", ID: "i", Key: "k", Subject: "outbox.a=2Eb", Data: []byte(`{"a": 1}`),
			Header: nats.Header{"Event-Type": {"put"}},
			Time:   time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
		{Document: "c", Subject: "outbox.c", Data: []byte("\xff"), Header: nats.Header{}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	for text, want := range map[string]string{
		"{}\n": "line 1: neither", "\n{": "line 2: unexpected end", `{"doc_id":"a"}`: "no payload",
		`{"doc_id":"a","payload":1,"headers":[]}`: "headers",
		`{"subject":"a","headers":{"a":1}}`:       "headers",
	} {
		if _, err := Lines(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if _, err := File("testdata/none"); err == nil {
		t.Error("a file that is not there")
	}
}
