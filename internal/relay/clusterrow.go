package relay

import (
	"fmt"

	"github.com/outflowhq/outflow/outbox"
)

// ClusterPrefix is the prefix of the control rows by which clusters that share nothing agree on who publishes
// what. They are no inputs. An outflow that does not know it passes them over.
const ClusterPrefix = "outflow.cluster"

// ClusterRow is a control row in which a cluster tells the others something. Kind says which of the other
// fields it has; the rest are zero.
type ClusterRow struct {
	Kind ClusterRowKind
	By   int // cluster.id of the writer, from 1 to [outbox.MaxCluster]
	Home int // Echo, Claim: cluster.id of the cluster that the row is about, never By

	// Hello is the number of a hello: in a hello its own, in an echo that of the hello that it answers, in a
	// yield that of the writer's newest hello, in a claim that of the newest hello that the writer has read
	// of Home. In Published it is that of the writer's newest hello, which lies before this row, or 0 where
	// the writer does not know that. The first hello of a cluster has at least 1, each later one a greater
	// number.
	// None is above [MaxHello].
	Hello uint64

	From outbox.LSN // Claim: the commits of Home that end above it
	To   outbox.LSN // Claim: and at or below it; Published: the writer's commits that end at or below it
}

// MaxHello is the greatest number of a hello. A home takes one for each return, so it comes nowhere near. A
// greater one was made by somebody else, and would leave the home no number that follows it.
const MaxHello = 1 << 48

// ClusterRowKind is what a [ClusterRow] says.
type ClusterRowKind uint8

// The kinds.
const (
	_ ClusterRowKind = iota
	// Published: the writer's commits up to To are in its stream, or it leaves them to others. A NATS server
	// that crashes may still lose them, unlike what a [Watermark] confirms. It is a sign of life as well.
	Published
	Hello // the writer has started, or its NATS is back; it publishes nothing until all others have echoed
	Echo  // what the writer claimed from Home before it read that hello, it wrote before this row
	Yield // the writer can't publish; others may claim its commits at once
	Claim // the writer publishes the commits of Home that end above From, up to To
)

var clusterRowKinds = [...]string{Published: "published", Hello: "hello", Echo: "echo", Yield: "yield",
	Claim: "claim"}

func (k ClusterRowKind) String() string {
	if int(k) < len(clusterRowKinds) && clusterRowKinds[k] != "" {
		return clusterRowKinds[k]
	}
	return fmt.Sprintf("ClusterRowKind(%d)", uint8(k))
}

// Content is the content of the control row.
func (r ClusterRow) Content() string {
	return fmt.Sprintf("v=1 %v by=%d home=%d hello=%d from=%v to=%v", r.Kind, r.By, r.Home, r.Hello, r.From,
		r.To)
}

// ParseClusterRow reads exactly what [ClusterRow.Content] writes. It is a claim of whoever may write control
// rows. One of a version that is not known is an error: whoever passes it over may publish what another one
// does.
func ParseClusterRow(content string) (r ClusterRow, err error) {
	var kind string
	_, err = fmt.Sscanf(content, "v=1 %s by=%d home=%d hello=%d from=%v to=%v", &kind, &r.By, &r.Home,
		&r.Hello, scannedLSN{&r.From}, scannedLSN{&r.To})
	for k, name := range clusterRowKinds {
		if name == kind {
			r.Kind = ClusterRowKind(k)
		}
	}
	if err == nil {
		err = r.sound()
	}
	if err == nil && r.Content() != content {
		err = fmt.Errorf("it would be written %q", r.Content())
	}
	if err != nil {
		return ClusterRow{}, fmt.Errorf("cluster row %q: %w", content, err)
	}
	return r, nil
}

// scannedLSN is where fmt.Sscanf puts an LSN.
type scannedLSN struct{ *outbox.LSN }

// Scan is that of fmt.Scanner.
func (l scannedLSN) Scan(s fmt.ScanState, _ rune) error {
	text, err := s.Token(false, nil)
	if err == nil {
		*l.LSN, err = outbox.ParseLSN(string(text))
	}
	return err
}

func (r ClusterRow) sound() error {
	about := r.Kind == Echo || r.Kind == Claim
	switch {
	case r.Kind == 0 || int(r.Kind) >= len(clusterRowKinds):
		return fmt.Errorf("%v is not known", r.Kind)
	case r.By < 1 || r.By > outbox.MaxCluster:
		return fmt.Errorf("by %d: want 1 to %d", r.By, outbox.MaxCluster)
	case about && (r.Home < 1 || r.Home > outbox.MaxCluster || r.Home == r.By), !about && r.Home != 0:
		return fmt.Errorf("home %d of a row by %d", r.Home, r.By)
	case r.Kind != Published && r.Hello == 0, r.Hello > MaxHello:
		return fmt.Errorf("hello %d", r.Hello)
	case r.Kind == Claim && r.From >= r.To, r.Kind != Claim && r.From != 0,
		r.Kind != Claim && r.Kind != Published && r.To != 0:
		return fmt.Errorf("from %v to %v", r.From, r.To)
	}
	return nil
}
