package config

import (
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// A shard is settled with the mapping. It divides rows: logical messages can't be divided.
func TestAShardDividesRowsAndNoMessages(t *testing.T) {
	t.Parallel()
	c, err := Load(Args{"shard": "1/4"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := ResolveMapping(c, []string{"doc_id", "payload"}, nil)
	if err != nil || r.Mapping.Shard != (relay.Shard{Index: 1, Of: 4}) {
		t.Error(r.Mapping, err)
	}
	for _, source := range []string{"message", "both"} {
		_, err := Load(Args{"shard": "1/4", "source": source}, nil)
		if outbox.ClassOf(err) != outbox.Usage || !strings.Contains(err.Error(), "shard = ") ||
			!strings.Contains(err.Error(), "set source to table") {
			t.Errorf("source %s: %v", source, err)
		}
		if _, err := Load(Args{"source": source}, nil); err != nil {
			t.Error(err)
		}
	}
}
