package relay

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

var defaults = Settings{DefaultHorizon, outbox.BySeqKey, DefaultMaxEvents, DefaultMaxBytes, Gap{}}

const content = "v=1 slot=outflow horizon=20ms sort=seq_key max_events=65536 max_bytes=67108864"

func TestSettingsAreWrittenAndReadAsAMessage(t *testing.T) {
	t.Parallel()
	if got := defaults.Content("outflow"); got != content {
		t.Errorf("got %s", got)
	}
	slot, s, err := ParseSettings(content)
	if err != nil || slot != "outflow" || s != defaults {
		t.Errorf("read as %q %v, %v", slot, s, err)
	}
	slot, s, err = ParseSettings("v=1 slot=b horizon=0s sort=commit max_events=1 max_bytes=1")
	if err != nil || slot != "b" || s != (Settings{0, outbox.ByCommit, 1, 1, Gap{}}) {
		t.Errorf("read as %q %v, %v", slot, s, err)
	}
}

var gapDefaults = Settings{0, outbox.ByGap, DefaultMaxEvents, DefaultMaxBytes,
	Gap{DefaultBound, DefaultCold, DefaultMemory, DefaultFirst, OfSequence}}

const gapContent = "v=2 slot=outflow mode=gap bound=10s cold=20ms memory=16384 first_counter=1 " +
	"gap_scope=sequence " +
	"max_events=65536 max_bytes=67108864"

func TestSettingsMessageOfGapMode(t *testing.T) {
	t.Parallel()
	if got := gapDefaults.Content("outflow"); got != gapContent {
		t.Errorf("got %s", got)
	}
	slot, s, err := ParseSettings(gapContent)
	if err != nil || slot != "outflow" || s != gapDefaults {
		t.Errorf("read as %q %v, %v", slot, s, err)
	}
	for _, wrong := range [][2]string{
		{"v=2", "v=1"}, {"v=2", "v=3"}, {"mode=gap", "mode=commit"}, {"bound=10s", "bound=0s"},
		{"bound=10s", "bound=25h"}, {"bound=10s", "bound=1ns"}, {"cold=20ms", "cold=11s"},
		{"memory=16384", "memory=0"}, {"memory=16384", "memory=1048577"},
		{"first_counter=1", "first_counter=2"}, {"gap_scope=sequence", "gap_scope=stream"},
		{"cold=20ms ", ""},
	} {
		text := strings.Replace(gapContent, wrong[0], wrong[1], 1)
		if slot, s, err := ParseSettings(text); err == nil || slot != "outflow" {
			t.Errorf("%s is taken as %q %v", text, slot, s)
		}
	}
	if _, _, err := ParseSettings(
		"v=1 slot=outflow horizon=0s sort=gap max_events=1 max_bytes=1"); err == nil {
		t.Error("a message of version 1 brings gap mode")
	}
}

func TestSettingsMessagesThatAreNone(t *testing.T) {
	t.Parallel()
	for text, slot := range map[string]string{ // with the slot that is known all the same
		"":                 "",
		"v=x slot=outflow": "",
		"v=0 slot=outflow": "",
		"v=1":              "",
		"v=1 slot=":        "",
		"slot=outflow v=1": "",
		"v=1 slot=outflow": "outflow",
		content + " more":  "outflow",
		"v=1 slot=outflow horizon=20 sort=seq_key max_events=65536 max_bytes=67108864":   "outflow",
		"v=1 slot=outflow horizon=-1s sort=seq_key max_events=65536 max_bytes=67108864":  "outflow",
		"v=1 slot=outflow horizon=1ns sort=seq_key max_events=65536 max_bytes=67108864":  "outflow",
		"v=1 slot=outflow horizon=25h sort=seq_key max_events=65536 max_bytes=67108864":  "outflow",
		"v=1 slot=outflow horizon=20ms sort=key max_events=65536 max_bytes=67108864":     "outflow",
		"v=1 slot=outflow horizon=20ms sort=seq_key max_events=0 max_bytes=67108864":     "outflow",
		"v=1 slot=outflow horizon=20ms sort=seq_key max_events=65536 max_bytes=0":        "outflow",
		"v=1 slot=outflow sort=seq_key horizon=20ms max_events=65536 max_bytes=67108864": "outflow",
		"v=1 slot=outflow horizon=20ms sort=seq_key max_events=4194305 max_bytes=1":      "outflow",
		"v=1 slot=outflow horizon=20ms sort=seq_key max_events=1 max_bytes=1073741825":   "outflow",
		"v=2 slot=outflow anything": "outflow",
		"v=2" + content[3:]:         "outflow",
		"v=1 slot=outflow  horizon=20ms sort=seq_key max_events=1 max_bytes=1": "outflow",
	} {
		got, s, err := ParseSettings(text)
		if err == nil || got != slot {
			t.Errorf("%q: slot %q, %v, %v", text, got, s, err)
		}
	}
	largest := Settings{MaxHorizon, outbox.ByCommit, MaxMaxEvents, MaxMaxBytes, Gap{}}
	if slot, s, err := ParseSettings(largest.Content("b")); err != nil || slot != "b" || s != largest {
		t.Errorf("the maxima: %q, %v, %v", slot, s, err)
	}
}

func FuzzSettings(f *testing.F) {
	f.Add(content)
	f.Add("v=2 slot=x")
	f.Add(gapContent)
	f.Fuzz(func(t *testing.T, text string) {
		slot, s, err := ParseSettings(text)
		if err != nil {
			return
		}
		if s.Validate() != nil {
			t.Fatalf("%q is taken as %v", text, s)
		}
		if slot2, s2, err := ParseSettings(s.Content(slot)); err != nil || slot2 != slot || s2 != s {
			t.Fatalf("%q: %v became %q %v, %v", text, s, slot2, s2, err)
		}
	})
}

func TestSettingsAreWrittenAndReadAsJSON(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(defaults)
	if want := `{"horizon":"20ms","sort":"seq_key","max_events":65536,"max_bytes":67108864}`; err != nil ||
		string(b) != want {
		t.Errorf("got %s, %v", b, err)
	}
	var s Settings
	if err := json.Unmarshal(b, &s); err != nil || s != defaults {
		t.Errorf("read as %v, %v", s, err)
	}
	if b, err = json.Marshal(gapDefaults); err != nil {
		t.Error(err)
	}
	if err := json.Unmarshal(b, &s); err != nil || s != gapDefaults {
		t.Errorf("%s read as %v, %v", b, s, err)
	}
	// As a record may have it that is older than the maxima.
	large := Settings{time.Hour, outbox.BySeqKey, 1 << 40, 1 << 50, Gap{}}
	if b, err = json.Marshal(large); err != nil {
		t.Error(err)
	}
	if err := json.Unmarshal(b, &s); err != nil || s != large {
		t.Errorf("read as %v, %v", s, err)
	}
	for _, text := range []string{`{}`, `{"horizon":"20ms","sort":"x"}`,
		`{"horizon":"1h","sort":"commit","max_events":0,"max_bytes":1}`, `[]`,
		`{"horizon":"0s","sort":"gap","max_events":1,"max_bytes":1}`} {
		if err := json.Unmarshal([]byte(text), &s); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}

func TestWithoutAKeyTheOrderIsThatOfTheCommitsOrOfTheCounters(t *testing.T) {
	t.Parallel()
	want := Settings{0, outbox.ByCommit, 7, 9, Gap{}}
	if got := (Settings{time.Second, outbox.BySeqKey, 7, 9, Gap{}}).Unkeyed(); got != want {
		t.Errorf("got %v", got)
	}
	if got := gapDefaults.Unkeyed(); got != gapDefaults {
		t.Errorf("got %v", got)
	}
}
