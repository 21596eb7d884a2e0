package decoder

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const controlOID = 16399

var controlColumnsOf = []col{{"id", oidUUID}, {"outbox", oidText}, {"prefix", oidText}, {"content", oidText}}

// homeConfig is that of a home with a control table, awayConfig that of whoever reads its rows elsewhere.
func homeConfig() Config {
	cfg := config
	cfg.Mapping.OwnOnly, cfg.Mapping.Control, cfg.Control = true, "public.outflow_control", controlOID
	return cfg
}

func awayConfig() Config {
	cfg := homeConfig()
	cfg.Slot = "reader"
	cfg.Mapping.OwnOnly, cfg.Mapping.Subscription, cfg.Origin = false, "home", "pg_16500"
	return cfg
}

func originAt(lsn outbox.LSN, name string) []byte {
	return cstring(be.AppendUint64([]byte{'O'}, uint64(lsn)), name)
}

func controlRow(outbox, prefix, content string) []byte {
	return insert(controlOID, txt("7f0c6b1e-0c39-4f1e-9a53-1d5c2b8e4a10"), txt(outbox), txt(prefix),
		bin(content))
}

// TestAHomesTransactionsAreInputsAsTheyAreAtHome: of what is read on another server only the home's
// transactions are inputs, with the position that they have at home, and control rows as at home.
func TestAHomesTransactionsAreInputsAsTheyAreAtHome(t *testing.T) {
	t.Parallel()
	settings := relay.Settings{Horizon: 1000, MaxEvents: 5, MaxBytes: 1 << 20}
	inputs := func(n int) [][]byte {
		switch n {
		case 0:
			return [][]byte{row("1", "[]"), controlRow("public.outbox", relay.HeartbeatPrefix, ""),
				row("2", "[]")}
		case 1:
			return [][]byte{controlRow("public.outbox", relay.HeartbeatPrefix, "")}
		case 2:
			return [][]byte{controlRow("public.outbox", relay.SettingsPrefix, settings.Content("outflow"))}
		case 3: // of another outbox, of an unknown kind, and what is not replicated
			return [][]byte{controlRow("public.other", relay.HeartbeatPrefix, ""),
				controlRow("public.outbox", "outflow.other", ""), logical(1, relay.HeartbeatPrefix, "")}
		}
		return [][]byte{row("3", "[]")}
	}
	const n = 5
	begins := [][]byte{relation(tableOID, columns...), relation(controlOID, controlColumnsOf...)}
	var home, away [][]byte
	for i := range n {
		lsn, there := outbox.LSN(0x100*(i+1)), outbox.LSN(0x9000+0x1000*i)
		tx := func(all [][]byte, start outbox.LSN, from []byte) [][]byte {
			if all = append(all, begin(start)); from != nil {
				all = append(all, from)
			}
			if len(all) < 3 {
				all = append(all, begins...)
			}
			return append(append(all, inputs(i)...), commit(start, start+0x30, int64(i)))
		}
		home = tx(home, lsn, nil)
		away = tx(away, there, originAt(lsn+0x30, "pg_16500"))
		away = tx(away, there+0x100, nil) // written there
		away = tx(away, there+0x200, originAt(lsn+0x31, "pg_16501"))
	}
	want, err := decodeAll(homeConfig(), home...)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeAll(awayConfig(), away...)
	if err != nil {
		t.Fatal(err)
	}
	var mine []Result
	before := outbox.LSN(0) // the home's commit that came last
	for _, r := range got {
		if r.Kind == Commit {
			if r.Commit.Read == 0 {
				t.Errorf("commit %v does not say where it was read", r.Commit.LSN)
			}
			if r.Commit.LSN == 0 {
				if r.Commit.Kind != relay.NoInput {
					t.Errorf("a transaction of another origin is an input: %+v", r.Commit)
				}
				continue
			}
			if r.Commit.Start != before {
				t.Errorf("commit %v starts at %v", r.Commit.LSN, r.Commit.Start)
			}
			before = r.Commit.LSN
		}
		mine = append(mine, r)
	}
	clean := func(all []Result) (text []string) {
		for _, r := range all {
			r.Commit.Read, r.Commit.Start = 0, 0
			text = append(text, fmt.Sprintf("%+v", r))
		}
		return text
	}
	if a, b := strings.Join(clean(mine), "\n"), strings.Join(clean(want), "\n"); a != b {
		t.Errorf("elsewhere:\n%s\nat home:\n%s", a, b)
	}
	var kinds []relay.Kind
	for _, c := range commits(want) {
		kinds = append(kinds, c.Kind)
	}
	if s := fmt.Sprint(kinds); s != fmt.Sprint([]relay.Kind{relay.Events, relay.Heartbeat,
		relay.SettingsChange, relay.NoInput, relay.Events}) {
		t.Errorf("at home: %v", s)
	}
}

// TestAHomesPositionsMustRise: what would make one event two, or hide one, ends the session.
func TestAHomesPositionsMustRise(t *testing.T) {
	t.Parallel()
	for _, second := range []outbox.LSN{0x130, 0x120, 0} {
		_, err := decodeAll(awayConfig(),
			begin(0x9000), originAt(0x130, "pg_16500"), commit(0x9000, 0x9030, 1),
			begin(0x9100), originAt(second, "pg_16500"), commit(0x9100, 0x9130, 1))
		if err == nil || !strings.Contains(err.Error(), "end LSN at home") {
			t.Errorf("%v after 0/130: %v", second, err)
		}
	}
	if results, err := decodeAll(awayConfig(), begin(0x9000), relation(controlOID, controlColumnsOf...),
		commit(0x9000, 0x9030, 1), begin(0x9100), originAt(0x130, "pg_16500"),
		insert(controlOID, txt("public.outbox")), commit(0x9100, 0x9130, 1)); err == nil {
		t.Errorf("a control row of another width: %v", results)
	}
}

// TestAHomesWatermarkIsReadElsewhere: with the commit that it came in, of the home alone; what is none is
// counted, and has no effect. At home it is passed over.
func TestAHomesWatermarkIsReadElsewhere(t *testing.T) {
	t.Parallel()
	want := relay.Watermark{Confirmed: relay.Confirmed{LSN: 0x100, Timeline: 1}, At: 0x110,
		Tally: relay.Tally{Since: 0x10, Events: 3, Sum: 4}}
	row := func(content string) []byte {
		return controlRow("public.outbox", relay.WatermarkPrefix, content)
	}
	head := [][]byte{relation(tableOID, columns...), relation(controlOID, controlColumnsOf...)}
	marks := func(cfg Config, from, content string) (marks []relay.Watermark, malformed int) {
		t.Helper()
		tx := append([][]byte{begin(0x9000), originAt(0x130, from)}, head...)
		results, err := decodeAll(cfg, append(tx, row(content), commit(0x9000, 0x9030, 1))...)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if r.Malformed != nil {
				malformed++
			}
			if r.Watermark != (relay.Watermark{}) {
				marks = append(marks, r.Watermark)
				if r.Kind != Commit || r.Commit.Kind != relay.NoInput {
					t.Errorf("it comes with %v, %v", r.Kind, r.Commit.Kind)
				}
			}
		}
		return marks, malformed
	}
	got, bad := marks(awayConfig(), "pg_16500", want.Content())
	if len(got) != 1 || got[0] != want || bad != 0 {
		t.Errorf("%+v, %d malformed", got, bad)
	}
	behind := want
	behind.At = 0x130
	for _, content := range []string{"", behind.Content(), strings.Repeat("v", maxWatermark+1)} {
		if got, bad := marks(awayConfig(), "pg_16500", content); len(got) != 0 || bad != 1 {
			t.Errorf("%.40q: %+v, %d malformed", content, got, bad)
		}
	}
	for what, cfg := range map[string]Config{"at home": homeConfig(), "of another cluster": awayConfig()} {
		from := "pg_16501"
		if got, bad := marks(cfg, from, want.Content()); len(got) != 0 || bad != 0 {
			t.Errorf("%s: %+v, %d malformed", what, got, bad)
		}
	}
}

// TestClusterRowsAreReadFromEachCluster: with the commit that they came in, from wherever they came, in their
// order, and what else is in those transactions stays what it was. Without clusters, which is any outflow so
// far, they are passed over.
func TestClusterRowsAreReadFromEachCluster(t *testing.T) {
	t.Parallel()
	claim := relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 1, Hello: 7, From: 0x10, To: 0x20}
	mark := relay.ClusterRow{Kind: relay.Published, By: 2, To: 0x130}
	row := func(r relay.ClusterRow) []byte {
		return controlRow("public.outbox", relay.ClusterPrefix, r.Content())
	}
	by := func(r relay.ClusterRow, n int) relay.ClusterRow { r.By = n; return r }
	decode := func(cfg Config, from string, rows ...[]byte) ([]Result, error) {
		tx := [][]byte{begin(0x9000)}
		if from != "" {
			tx = append(tx, originAt(0x130, from))
		}
		tx = append(tx, relation(tableOID, columns...), relation(controlOID, controlColumnsOf...))
		return decodeAll(cfg, append(append(tx, rows...), commit(0x9000, 0x9030, 1))...)
	}
	wrong := func(cfg Config, rows ...[]byte) {
		t.Helper()
		_, err := decode(cfg, "pg_16501", rows...)
		if f := outbox.FaultOf(err); f == nil || f.Code != CodeClusterRow || f.Class != outbox.Fatal {
			t.Errorf("%.80q: %v", rows[0], err)
		}
	}
	read := func(cfg Config, from string, rows ...[]byte) (got []relay.ClusterRow, c relay.Commit, bad int) {
		t.Helper()
		results, err := decode(cfg, from, rows...)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if r.Malformed != nil {
				bad++
			}
			if r.Kind == Commit {
				got, c = r.ClusterRows, r.Commit
			}
		}
		return got, c, bad
	}
	clusters := map[string]int{"": 3, "pg_16500": 1, "pg_16501": 2}
	with := func(cfg Config) Config { cfg.Clusters = clusters; return cfg }
	tick := controlRow("public.outbox", relay.HeartbeatPrefix, "")
	for name, cfg := range map[string]Config{"at home": homeConfig(), "elsewhere": awayConfig()} {
		for from, n := range clusters {
			want := []relay.ClusterRow{by(claim, n), by(mark, n)}
			if n == want[0].Home {
				want = want[1:]
			}
			rows := [][]byte{tick}
			for _, r := range want {
				rows = append(rows, row(r))
			}
			got, c, bad := read(with(cfg), from, rows...)
			if !slices.Equal(got, want) || bad != 0 {
				t.Errorf("%s, of cluster %d: %+v, %d malformed", name, n, got, bad)
			}
			before, was, _ := read(cfg, from, rows...)
			if len(before) != 0 || was != c {
				t.Errorf("%s, of cluster %d: %+v without clusters, and %+v where it was %+v", name, n, before,
					c, was)
			}
		}
	}
	cfg := with(awayConfig())
	if got, _, bad := read(cfg, "pg_16999", row(claim)); len(got) != 0 || bad != 0 {
		t.Errorf("of a stranger: %+v, %d malformed", got, bad)
	}
	ours := relay.ClusterRow{Kind: relay.Claim, By: 2, Home: 3, Hello: 7, To: 0x9000}
	if got, _, _ := read(cfg, "pg_16501", row(ours)); len(got) != 1 {
		t.Errorf("a claim of what ends here: %+v", got)
	}
	behind := mark
	behind.To++
	ours.To++
	for _, content := range []string{"", by(claim, 3).Content(), behind.Content(), ours.Content(),
		strings.Replace(claim.Content(), "v=1", "v=2", 1), strings.Repeat("v", maxClusterRow+1)} {
		bad := controlRow("public.outbox", relay.ClusterPrefix, content)
		wrong(cfg, bad)
		if got, _, n := read(awayConfig(), "pg_16501", bad); len(got) != 0 || n != 0 {
			t.Errorf("%.40q without clusters: %+v, %d malformed", content, got, n)
		}
	}
	wrong(cfg, slices.Repeat([][]byte{row(claim)}, maxClusterRows+1)...)
}

// TestWhatIsCompleteIsKnownBeforeTheFirstEvent: Begin says at home up to where all inputs were read, and
// Origin where the home's are read elsewhere.
func TestWhatIsCompleteIsKnownBeforeTheFirstEvent(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		cfg  Config
		want []outbox.LSN // after each message
	}{
		{homeConfig(), []outbox.LSN{0x100, 0x100, 0x130, 0x200, 0x200, 0x230}},
		{awayConfig(), []outbox.LSN{0, 0x92F, 0x930, 0x930, 0x930, 0x930}},
	} {
		d := New(test.cfg)
		var r Result
		for i, m := range [][]byte{
			begin(0x100), originAt(0x930, "pg_16500"), commit(0x100, 0x130, 1),
			begin(0x200), originAt(0x999, "pg_16501"), commit(0x200, 0x230, 2),
		} {
			if err := d.Decode(m, &r); err != nil || d.Complete() != test.want[i] {
				t.Errorf("message %d: %v, %v, want %v", i, err, d.Complete(), test.want[i])
			}
		}
	}
}
