package consumertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/consumer"
)

// orders knows three versions: 2 has a number of pieces, 3 a list of items.
func orders() *consumer.Schema {
	return &consumer.Schema{
		Current: "3", From: consumer.FieldVersion("version"), Missing: "1",
		Up: map[string]consumer.Up{"1": {To: "2", Do: oneEach}, "2": {To: "3", Do: listed}},
	}
}

type order struct {
	Item  string   `json:"item,omitempty"`
	N     int      `json:"n,omitempty"`
	Items []string `json:"items,omitempty"`
}

func convert(data []byte, change func(*order) error) ([]byte, error) {
	var o order
	if err := json.Unmarshal(data, &o); err != nil {
		return nil, err
	}
	if err := change(&o); err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	return append(text, '\n'), err
}

func oneEach(data []byte) ([]byte, error) {
	return convert(data, func(o *order) error { o.N = 1; return nil })
}

func listed(data []byte) ([]byte, error) {
	return convert(data, func(o *order) error {
		if o.N < 0 {
			return errors.New("less than none")
		}
		for range o.N {
			o.Items = append(o.Items, o.Item)
		}
		o.Item, o.N = "", 0
		return nil
	})
}

func TestGoldenFilesHoldWhatUpcastersMake(t *testing.T) {
	t.Parallel()
	Golden(t, orders(), filepath.Join("testdata", "upcast"))
}

func TestGoldenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	check := func(update bool, want ...string) {
		t.Helper()
		got := golden(orders(), dir, update)
		if len(got) != len(want) {
			t.Errorf("%v, want %q", got, want)
		}
		for _, w := range want {
			if !strings.Contains(fmt.Sprint(got), w) {
				t.Errorf("%v, want %q", got, w)
			}
		}
	}
	check(false, `no file of version "1"`, `no file of version "2"`)
	write("1.json", `{"item":"pear"}`)
	write("2_some.json", `{"item":"fig","n":2}`)
	write("2_wrong.json", `{"item":"fig","n":-2}`)
	write("2_other.json", `{"version":1}`)
	write("9.json", `{}`)
	write("3.golden", `{}`)
	all := []string{
		"2_other.json: the name says", `2_wrong.json: upcaster from version "2" to "3": less than none`,
		"3.golden: there is no payload",
		`9.json: "9" is of no version`,
	}
	check(false, append([]string{"1.golden: no such file or directory. Make it with -consumertest.update",
		"2_some.golden"}, all...)...)
	check(true, all...)
	check(false, all...)
	write("1.golden", "{\"items\":[\"apple\"]}\n")
	check(false, append(append([]string{}, `1.golden (- expected, + found):`), all...)...)
	if text := fmt.Sprint(golden(orders(), dir, false)); !strings.Contains(text,
		"  - {\"items\":[\"apple\"]}\n  + {\"items\":[\"pear\"]}") {
		t.Error(text)
	}
	if got := golden(&consumer.Schema{}, dir, false); len(got) != 1 ||
		!strings.Contains(got[0].Error(), "Current is empty") {
		t.Error(got)
	}
}
