package decoder

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/must"
)

// Every server's captures, text and binary, give the events that the golden files list.
func TestCapturedStreamsGiveTheEventsOfTheirFiles(t *testing.T) {
	t.Parallel()
	for _, server := range load(t) {
		for _, c := range server.Captures {
			t.Run(fmt.Sprintf("%s/%s/binary=%v", server.Version, c.Scenario, c.Binary), func(t *testing.T) {
				t.Parallel()
				checkGolden(t, c)
			})
		}
	}
}

// The text and the binary form of the same transactions give the same in every respect.
func TestTextAndBinaryAgree(t *testing.T) {
	t.Parallel()
	for _, server := range load(t) {
		text := map[string][]Result{}
		for _, c := range server.Captures {
			results, err := decodeAll(c.config(t), c.Messages...)
			must.Succeed(t, err)
			if !c.Binary {
				text[c.Scenario] = results
				continue
			}
			if len(results) == 0 || !reflect.DeepEqual(results, text[c.Scenario]) {
				t.Errorf("PostgreSQL %s, %s: the forms differ", server.Version, c.Scenario)
			}
		}
	}
}
