package replication

import (
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
)

func TestATimelineHistoryIsRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, content string
		want          []relay.Switch
		bad           string
	}{
		{name: "one promotion", content: "1\t0/3000148\tno recovery target specified\n",
			want: []relay.Switch{{Timeline: 1, End: 0x3000148}}},
		{
			name: "several, with blank lines and a comment",
			content: "# by hand\n1\t0/3000148\tno recovery target specified\n\n2\t1/5A0\tbefore 2024-05-01 " +
				"10:00:00+02\n\n5\t1/5A0\tx",
			want: []relay.Switch{{Timeline: 1, End: 0x3000148}, {Timeline: 2, End: 0x1000005A0},
				{Timeline: 5, End: 0x1000005A0}},
		},
		{name: "empty", content: "\n"},
		{name: "no LSN", content: "1\n", bad: "a timeline and an LSN"},
		{name: "no timeline", content: "x\t0/1\n", bad: "a timeline first"},
		{name: "timeline 0", content: "0\t0/1\n", bad: "a timeline first"},
		{name: "bad LSN", content: "1\t0/1G\n", bad: "not of the form"},
		{name: "timelines go back", content: "2\t0/1\n1\t0/2\n", bad: "ascending"},
		{name: "LSNs go back", content: "1\t0/2\n2\t0/1\n", bad: "ascending"},
	} {
		got, err := parseHistory([]byte(c.content))
		if c.bad != "" {
			if err == nil || !strings.Contains(err.Error(), c.bad) {
				t.Errorf("%s: %v, want %q", c.name, err, c.bad)
			}
			continue
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v; want %v", c.name, got, err, c.want)
		}
	}
}
