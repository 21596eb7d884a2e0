package recording

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestTracesAreTheRecordedOnes(t *testing.T) {
	t.Parallel()
	b, err := data.ReadFile("data/manifest.json")
	must.Succeed(t, err)
	var manifest map[string]struct {
		Ops         int    `json:"ops"`
		Actors      int    `json:"actors"`
		SHA256Ops   string `json:"sha256_ops"`
		SHA256Final string `json:"sha256_final"`
	}
	must.Succeed(t, json.Unmarshal(b, &manifest))
	if len(manifest) != len(Names()) {
		t.Errorf("the manifest has %d traces, Names %d", len(manifest), len(Names()))
	}
	for _, name := range Names() {
		want := manifest[name]
		for file, sum := range map[string]string{name + ".ops.jsonl.gz": want.SHA256Ops, name +
			".final.txt.gz": want.SHA256Final} {
			b, err := unpack(file)
			must.Succeed(t, err)
			if got := sha256.Sum256(b); hex.EncodeToString(got[:]) != sum {
				t.Errorf("%s has SHA-256 %x, want %s", file, got, sum)
			}
		}
		ops, err := Load(name)
		must.Succeed(t, err)
		last, clock := map[string]int64{}, map[string]int64{}
		for i, op := range ops {
			span, err := op.Span()
			must.Succeed(t, err)
			if op.Doc != name || op.T != i || op.Counter != last[op.Actor]+1 || len(op.Payload) == 0 ||
				op.Clock != clock[op.Actor] || span < 1 {
				t.Fatalf("%s: operation %d is %+v after counter %d, clock %d", name, i, op, last[op.Actor],
					clock[op.Actor])
			}
			last[op.Actor] = op.Counter
			clock[op.Actor] += span
		}
		if len(ops) != want.Ops || len(last) != want.Actors {
			t.Errorf("%s: %d operations of %d actors, want %d of %d", name, len(ops), len(last), want.Ops,
				want.Actors)
		}
	}
}

func replay(ops []Op) (string, error) {
	var text Text
	for _, op := range ops {
		if err := text.Apply(op.Payload); err != nil {
			return "", err
		}
	}
	return text.String(), nil
}

func TestReplayGivesTheFinalText(t *testing.T) {
	t.Parallel()
	for _, name := range []string{SvelteComponent, RustCode} {
		ops, err := Load(name)
		must.Succeed(t, err)
		want, err := Final(name)
		must.Succeed(t, err)
		if got, err := replay(ops); err != nil || got != want {
			t.Errorf("%s: the replay gives %d bytes, %v, want the final text of %d bytes", name, len(got),
				err, len(want))
		}
		// Not every mistake is seen: what was typed in the wrong order may have been deleted later.
		seen := false
		for i := len(ops) - 50; i < len(ops)-1; i++ {
			swapped := slices.Clone(ops)
			swapped[i], swapped[i+1] = swapped[i+1], swapped[i]
			if got, err := replay(swapped); err != nil || got != want {
				seen = true
				break
			}
		}
		if !seen {
			t.Errorf("%s: none of 49 swaps of neighbours shows", name)
		}
	}
}

func TestEditsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	for _, payload := range []string{``, `{}`, `[[0]]`, `[[1,0,"x"]]`, `[[0,1,""]]`, `[[-1,0,"x"]]`,
		`[["0",0,"x"]]`} {
		var text Text
		if err := text.Apply([]byte(payload)); err == nil {
			t.Errorf("Apply(%s) gave no error", payload)
		}
	}
}
