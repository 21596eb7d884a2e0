package relay

import (
	"encoding/json"
	"testing"
)

func TestAShardIsParsedOrRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Shard{"": {}, "0/1": {0, 1}, "3/4": {3, 4}, "63/64": {63, 64}} {
		if got, err := ParseShard(text); err != nil || got != want || got.String() != text {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"/", "1", "1/", "/4", "4/4", "-1/4", "0/0", "0/65", "01/4", "1/04", "+1/4",
		" 1/4", "1/4/", "a/b", "0/-1"} {
		if got, err := ParseShard(text); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
	doc, err := json.Marshal([]Mapping{{Table: "t"}, {Table: "t", Shard: Shard{1, 3}}})
	if want := `[{"table":"t","doc_id":"","payload":""},{"table":"t","shard":"1/3","doc_id":"","payload":""}]`; err != nil || string(doc) != want {
		t.Errorf("%s, %v; want %s", doc, err, want)
	}
	var back []Mapping
	if err := json.Unmarshal(doc, &back); err != nil || back[0] != (Mapping{Table: "t"}) ||
		back[1].Shard != (Shard{1, 3}) {
		t.Error(back, err)
	}
	if err := json.Unmarshal([]byte(`{"shard":"3/3"}`), &Mapping{}); err == nil {
		t.Error("shard 3/3 is taken")
	}
}
