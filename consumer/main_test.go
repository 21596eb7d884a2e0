package consumer

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/natstest"
	"github.com/outflowhq/outflow/internal/pgtest"
)

func TestMain(m *testing.M) {
	natstest.RunChild()
	goleak.VerifyTestMain(pgtest.Tests(m))
}
