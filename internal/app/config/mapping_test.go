package config

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// The three shapes of table work by mapping alone.
func TestSampleTablesWorkByMappingAlone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		sample            string
		columns, template []string
		want              Resolved
		keyed             bool
	}{
		{
			"crdt",
			[]string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload", "created_at",
				"published_at"},
			[]string{"doc_id"},
			Resolved{
				Mapping: relay.Mapping{Table: "public.outbox", Doc: "doc_id", Actor: "actor_id",
					Counter: "counter", Key: "seq_key", Payload: "payload"},
				ID: "id", Uses: map[string]Use{"doc_id": {Role: InDoc}},
			},
			true,
		},
		{
			"topic",
			[]string{"id", "topic", "message", "state", "created_at", "processed_at"},
			[]string{"topic"},
			Resolved{
				Mapping: relay.Mapping{Table: "public.outbox", Doc: "topic", Payload: "message"},
				ID:      "id", Uses: map[string]Use{"topic": {Role: InDoc}},
			},
			false,
		},
		{
			"partitioned",
			[]string{"event_id", "aggregate_type", "aggregate_id", "event_type", "payload", "partition_key",
				"created_at"},
			[]string{"aggregate_type", "partition_key"},
			Resolved{
				Mapping: relay.Mapping{Table: "public.domain_events", Doc: "partition_key",
					Payload: "payload"},
				ID:    "event_id",
				Extra: []string{"aggregate_type", "event_type"},
				Uses: map[string]Use{
					"aggregate_type": {Extra: 0}, "partition_key": {Role: InDoc}, "event_id": {Role: InID},
					"event_type": {Extra: 1},
				},
			},
			false,
		},
	} {
		t.Run(tt.sample, func(t *testing.T) {
			t.Parallel()
			c, err := Load(Args{"config": "../../../docs/samples/" + tt.sample + ".yaml"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, column := range tt.template {
				if !strings.Contains(c.Subject, "{"+column) {
					t.Errorf("subject %s does not use %s", c.Subject, column)
				}
			}
			got, err := ResolveMapping(c, tt.columns, tt.template)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("%+v\nwant\n%+v", got, tt.want)
			}
			if got.Mapping.Keyed() != tt.keyed {
				t.Errorf("keyed is %v", !tt.keyed)
			}
		})
	}
}

func TestAMappingIsResolvedAgainstTheTable(t *testing.T) {
	t.Parallel()
	all := []string{"id", "doc_id", "actor_id", "counter", "seq_key", "payload"}
	for _, tt := range []struct {
		name            string
		args            Args
		table, template []string
		want            Resolved
	}{
		{"defaults that are not there", nil, []string{"doc_id", "payload"}, nil,
			Resolved{Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"}}},
		{"absent though there", Args{"columns.id": "", "columns.actor_id": "", "columns.counter": "",
			"columns.seq_key": ""}, all,
			[]string{"actor_id"},
			Resolved{Mapping: relay.Mapping{Doc: "doc_id", Payload: "payload"}, Extra: []string{"actor_id"},
				Uses: map[string]Use{"actor_id": {}}}},
		{"computed key", nil, []string{"doc_id", "actor_id", "counter", "payload"},
			[]string{"seq_key", "counter"},
			Resolved{Mapping: relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter",
				Payload: "payload"},
				Extra: []string{"counter"}, Uses: map[string]Use{"seq_key": {Role: InKey}, "counter": {}}}},
		{"role by its name", Args{"columns.doc_id": "room", "columns.counter": "n"},
			[]string{"room", "n", "payload"},
			[]string{"doc_id", "room", "counter", "n"},
			Resolved{Mapping: relay.Mapping{Doc: "room", Counter: "n", Payload: "payload"},
				Extra: []string{"n"},
				Uses: map[string]Use{"doc_id": {Role: InDoc}, "room": {Role: InDoc}, "counter": {},
					"n": {}}}},
		{"column before role", Args{"columns.doc_id": "room"}, []string{"room", "doc_id", "payload"},
			[]string{"doc_id", "room"},
			Resolved{Mapping: relay.Mapping{Doc: "room", Payload: "payload"}, Extra: []string{"doc_id"},
				Uses: map[string]Use{"doc_id": {}, "room": {Role: InDoc}}}},
		{"headers", Args{"headers": "T=type,U=type,I=id,A=actor_id,K=seq_key"},
			append([]string{"type"}, all...), []string{"doc_id"},
			Resolved{Mapping: relay.Mapping{Doc: "doc_id", Actor: "actor_id", Counter: "counter",
				Key: "seq_key", Payload: "payload"}, ID: "id",
				Extra: []string{"type"}, Uses: map[string]Use{"doc_id": {Role: InDoc}, "type": {},
					"id":       {Role: InID},
					"actor_id": {Role: InActor}, "seq_key": {Role: InKey}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, err := Load(tt.args, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ResolveMapping(c, tt.table, tt.template)
			if err != nil {
				t.Fatal(err)
			}
			tt.want.Mapping.Table = "public.outbox"
			if tt.want.Uses == nil {
				tt.want.Uses = map[string]Use{}
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("%+v\nwant\n%+v", got, tt.want)
			}
		})
	}
}

func TestMissingColumnsAreNamedWithWhatThereIs(t *testing.T) {
	t.Parallel()
	table := []string{"id", "topic", "message"}
	for _, tt := range []struct {
		name     string
		args     Args
		template []string
		want     string
	}{
		{"required", nil, []string{"doc_id"},
			`table public.outbox lacks column "doc_id" (columns.doc_id), column "payload" (columns.payload); ` +
				`it has id, topic, message. Set columns.doc_id to one of them`},
		{"named", Args{"columns.doc_id": "topic", "columns.payload": "message", "columns.seq_key": "seq_key"},
			nil,
			`lacks column "seq_key" (columns.seq_key); it has id, topic, message. Set columns.seq_key to one of them, or to "" if there is none`},
		{"subject", Args{"columns.doc_id": "topic", "columns.payload": "message"},
			[]string{"tenant", "seq_key"},
			`lacks column "tenant" (subject), column "seq_key" (subject); it has`},
		{"header", Args{"columns.doc_id": "topic", "columns.payload": "message", "headers": "T=type"}, nil,
			`lacks column "type" (headers.T)`},
	} {
		c, err := Load(tt.args, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ResolveMapping(c, table, tt.template)
		f := outbox.FaultOf(err)
		if f == nil || f.Class != outbox.Fatal || f.Code != "column_missing" ||
			!strings.Contains(f.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.want)
		}
	}
}

func TestPayloadIsNoHeader(t *testing.T) {
	t.Parallel()
	for _, column := range []string{"payload", "body"} {
		c, err := Load(Args{"columns.payload": "body", "headers": "B=" + column}, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ResolveMapping(c, []string{"doc_id", "body"}, nil)
		if outbox.ClassOf(err) != outbox.Usage || !strings.Contains(err.Error(), "headers.B") {
			t.Errorf("%s: %v, want a usage error that names headers.B", column, err)
		}
	}
}

func TestTooManyColumnsAreRefused(t *testing.T) {
	t.Parallel()
	c, err := Load(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	table := []string{"doc_id", "payload"}
	var used []string
	for i := range relay.MaxExtra {
		used = append(used, fmt.Sprint("c", i))
	}
	if _, err = ResolveMapping(c, append(table, used...), used); err != nil {
		t.Fatal(err)
	}
	used = append(used, "one_more")
	if _, err = ResolveMapping(c, append(table, used...), used); outbox.ClassOf(err) != outbox.Usage {
		t.Errorf("%v, want a usage error", err)
	}
}

// Without a table the roles have their own names, whatever the settings call their columns, and any other
// name is a header's.
func TestWithoutATableTheRolesHaveTheirOwnNames(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		args     Args
		template []string
		want     Resolved
		keyed    bool
	}{
		"defaults": {
			Args{}, []string{"doc_id"},
			Resolved{
				Mapping: relay.Mapping{Source: relay.FromMessage, Doc: "doc_id", Actor: "actor_id",
					Counter: "counter", Key: "seq_key", Payload: "payload"},
				ID: "id", Uses: map[string]Use{"doc_id": {Role: InDoc}},
			},
			true,
		},
		"names of a table": {
			Args{"columns.doc_id": "topic", "columns.counter": "n",
				"headers": "Type=event_type,N=n,Topic=topic,Id=id", "table": "app.events"},
			[]string{"topic", "doc_id", "seq_key", "tenant", "counter"},
			Resolved{
				Mapping: relay.Mapping{Source: relay.FromMessage, Doc: "doc_id", Actor: "actor_id",
					Counter: "counter", Key: "seq_key", Payload: "payload"},
				ID: "id", Extra: []string{"tenant", "counter", "event_type"},
				Uses: map[string]Use{
					"topic": {Role: InDoc}, "doc_id": {Role: InDoc}, "seq_key": {Role: InKey},
					"id":     {Role: InID},
					"tenant": {Extra: 0}, "counter": {Extra: 1}, "event_type": {Extra: 2}, "n": {Extra: 1},
				},
			},
			true,
		},
		"commit order": {
			Args{"columns.seq_key": "", "columns.counter": ""}, []string{"doc_id"},
			Resolved{
				Mapping: relay.Mapping{Source: relay.FromMessage, Doc: "doc_id", Actor: "actor_id",
					Payload: "payload"},
				ID: "id", Uses: map[string]Use{"doc_id": {Role: InDoc}},
			},
			false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.args["source"] = "message"
			c, err := Load(tt.args, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ResolveMapping(c, nil, tt.template)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tt.want) || got.Mapping.Keyed() != tt.keyed {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
	c, err := Load(Args{"source": "message", "columns.payload": "body", "subject": "outbox.{body}"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ResolveMapping(c, nil, []string{"body"}); outbox.ClassOf(err) != outbox.Usage {
		t.Errorf("the payload as a part of the subject: %v", err)
	}
	if c, err = Load(Args{"source": "both"}, nil); err != nil {
		t.Fatal(err)
	}
	if r, err := ResolveMapping(c, []string{"id", "doc_id", "payload"}, nil); err != nil ||
		r.Mapping.Source != relay.FromBoth || r.Mapping.Table != "public.outbox" {
		t.Errorf("%+v %v", r, err)
	}
	if _, err := ResolveMapping(c, []string{"id", "doc_id", "payload"},
		[]string{"event_type"}); outbox.ClassOf(err) != outbox.Fatal {
		t.Errorf("with both, a column that the table lacks: %v", err)
	}
}
