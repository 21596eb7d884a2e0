package consumertest

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(pgtest.Tests(m)) }
