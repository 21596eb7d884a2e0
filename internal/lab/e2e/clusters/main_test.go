package clusters

import (
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
