package relay

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/outflowhq/outflow/outbox"
)

// ClusterPrefix is the prefix of the control rows by which clusters that share nothing agree on who publishes
// what. They are no inputs. An outflow that does not know it passes them over.
const ClusterPrefix = "outflow.cluster"

// ClusterRow is what a cluster says to the others in a control row. Which fields it has depends on Kind, the
// others are zero.
type ClusterRow struct {
	Kind ClusterRowKind
	By   int // cluster.id of its writer, from 1 to [outbox.MaxCluster]
	Home int // Echo, Claim: the cluster that it is about, not By

	// Hello is the number of a hello: a hello's own; an echo's, of the hello that it answers; of a yield and
	// a claim the newest one that its writer has said, or read of Home. From 1; each hello of a cluster has a
	// greater one than those before.
	Hello uint64

	From outbox.LSN // Claim: of the home's commits that end above it
	To   outbox.LSN // Claim: and up to here; Published: up to here
}

// ClusterRowKind is what a [ClusterRow] says.
type ClusterRowKind uint8

// The kinds.
const (
	_ ClusterRowKind = iota
	// Published: of the writer's commits those up to To are in its stream, or left to others. Also a sign of
	// life. Unlike what a [Watermark] confirms they may be lost by a NATS server that crashes.
	Published
	Hello // the writer has started, or its NATS is back: it publishes nothing until all have echoed
	Echo  // whatever the writer had claimed of the home before that hello lies before this row
	Yield // the writer can't reach its NATS: others may claim at once
	Claim // the writer publishes what the home has in From to To
)

var clusterRowKinds = [...]string{Published: "published", Hello: "hello", Echo: "echo", Yield: "yield",
	Claim: "claim"}

func (k ClusterRowKind) String() string {
	if int(k) < len(clusterRowKinds) && clusterRowKinds[k] != "" {
		return clusterRowKinds[k]
	}
	return fmt.Sprintf("ClusterRowKind(%d)", uint8(k))
}

const clusterRowVersion = 1

// Content is the content of the control row.
func (r ClusterRow) Content() string {
	return fmt.Sprintf("v=%d %v by=%d home=%d hello=%d from=%v to=%v", clusterRowVersion, r.Kind, r.By,
		r.Home, r.Hello, r.From, r.To)
}

// ParseClusterRow reads exactly what [ClusterRow.Content] writes. It is a claim of whoever may write control
// rows. One of a version that is not known is an error: whoever passes it over may publish what another one
// does.
func ParseClusterRow(content string) (r ClusterRow, err error) {
	fail := func(format string, args ...any) (ClusterRow, error) {
		return ClusterRow{}, fmt.Errorf("cluster row %q: %s", content, fmt.Sprintf(format, args...))
	}
	fields := strings.Split(content, " ")
	if fields[0] != "v="+strconv.Itoa(clusterRowVersion) {
		return fail("version %q is not known", fields[0])
	}
	if len(fields) != 2+len(clusterRowKeys) {
		return fail("want %d fields", 2+len(clusterRowKeys))
	}
	for k, name := range clusterRowKinds {
		if name != "" && name == fields[1] {
			r.Kind = ClusterRowKind(k)
		}
	}
	for i, key := range clusterRowKeys {
		value, ok := strings.CutPrefix(fields[2+i], key)
		if !ok {
			return fail("want %s", key)
		}
		switch i {
		case 0:
			r.By, err = strconv.Atoi(value)
		case 1:
			r.Home, err = strconv.Atoi(value)
		case 2:
			r.Hello, err = strconv.ParseUint(value, 10, 64)
		case 3:
			r.From, err = outbox.ParseLSN(value)
		case 4:
			r.To, err = outbox.ParseLSN(value)
		}
		if err != nil {
			return fail("%s %v", strings.TrimSuffix(key, "="), err)
		}
	}
	if text := r.Content(); text != content {
		return fail("it would be written %q", text)
	}
	if err := r.sound(); err != nil {
		return fail("%v", err)
	}
	return r, nil
}

var clusterRowKeys = [...]string{"by=", "home=", "hello=", "from=", "to="}

func (r ClusterRow) sound() error {
	about := r.Kind == Echo || r.Kind == Claim
	switch {
	case r.Kind == 0 || int(r.Kind) >= len(clusterRowKinds):
		return fmt.Errorf("%v is not known", r.Kind)
	case r.By < 1 || r.By > outbox.MaxCluster:
		return fmt.Errorf("by %d: want 1 to %d", r.By, outbox.MaxCluster)
	case about && (r.Home < 1 || r.Home > outbox.MaxCluster || r.Home == r.By), !about && r.Home != 0:
		return fmt.Errorf("home %d of a row by %d", r.Home, r.By)
	case r.Kind == Published && r.Hello != 0, r.Kind != Published && r.Hello == 0:
		return fmt.Errorf("hello %d", r.Hello)
	case r.Kind == Claim && r.From >= r.To, r.Kind != Claim && r.From != 0,
		r.Kind != Claim && r.Kind != Published && r.To != 0:
		return fmt.Errorf("from %v to %v", r.From, r.To)
	}
	return nil
}
