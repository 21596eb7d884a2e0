package main

import (
	"testing"

	"github.com/outflowhq/outflow/consumer/consumertest"
)

// What an old event becomes is pinned: testdata/1.json is a payload of version 1, testdata/1.golden what the
// handler sees of it.
func TestOldPayloadsBecomeWhatIsPinned(t *testing.T) {
	t.Parallel()
	consumertest.Golden(t, payloads, "testdata")
}

func TestPayloadsThatNobodyKnows(t *testing.T) {
	t.Parallel()
	for version, data := range map[string]string{
		"1": `{"item": "sku-7", "boxes": 3}`,
		"2": `{"sku": "sku-7", "quantity": 36, "colour": "red"}`,
		"9": `{}`,
	} {
		if got, err := payloads.Upcast(version, []byte(data)); err == nil {
			t.Errorf("version %s: %s becomes %s, want an error", version, data, got)
		}
	}
}
