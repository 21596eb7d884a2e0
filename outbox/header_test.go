package outbox

import (
	"bytes"
	"crypto/sha256"
	"strings"
	"testing"
)

const headerText = "v=1 lsn=0/16B3748 i=3 n=0 of=12 due=0/16B3748 thru=0/16B37F0 pull=2 tl=1 sort=s " +
	"id=6f96 key=actor=20a:0001"

func someHeader() Header {
	return Header{
		Pos: Position{LSN: 0x16B3748, Index: 3}, Of: 12, Due: 0x16B3748, Thru: 0x16B37F0, Pull: 2,
		Timeline: 1,
		ID:       "6f96", Key: "actor a:0001",
	}
}

func TestHeadersSurviveTheirText(t *testing.T) {
	t.Parallel()
	h := someHeader()
	if got := h.String(); got != headerText {
		t.Errorf("got  %s\nwant %s", got, headerText)
	}
	back, err := ParseHeader(headerText)
	if err != nil || back != h {
		t.Errorf("read back as %+v, %v", back, err)
	}
	h.Sort, h.ID, h.Key = ByCommit, "", ""
	if got, want := h.String(), "sort=c id= key="; !strings.HasSuffix(got, want) {
		t.Errorf("%s does not end in %s", got, want)
	}
	if back, err := ParseHeader(h.String() + " later=1"); err != nil || back != h {
		t.Errorf("with a later field: %+v, %v", back, err)
	}
}

func TestALongKeyIsCutInTheHeader(t *testing.T) {
	t.Parallel()
	h := someHeader()
	h.Key = strings.Repeat("k", 300)
	back, err := ParseHeader(h.String())
	if err != nil || !strings.HasPrefix(back.Key, strings.Repeat("k", 128)+"=~") || len(back.Key) != 162 {
		t.Errorf("key of %d bytes: %q, %v", len(back.Key), back.Key, err)
	}
	if !back.Same(&h) {
		t.Error("not the same message any more")
	}
}

func TestMalformedHeadersAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "v=1", "v=2" + headerText[3:], headerText[4:], strings.Replace(headerText, "i=3 n=0", "n=0 i=3",
			1),
		strings.Replace(headerText, "i=3", "i=-3", 1), strings.Replace(headerText, "i=3", "i=4294967296", 1),
		strings.Replace(headerText, "n=0", "n=9223372036854775808", 1),
		strings.Replace(headerText, "of=12", "of=x", 1),
		strings.Replace(headerText, "lsn=0/16B3748", "lsn=16B3748", 1),
		strings.Replace(headerText, "thru=0/16B37F0", "thru=", 1),
		strings.Replace(headerText, "sort=s", "sort=x", 1),
		strings.Replace(headerText, "tl=1", "tl=4294967296", 1),
		strings.TrimSuffix(headerText, " key=actor=20a:0001"),
	} {
		if h, err := ParseHeader(text); err == nil {
			t.Errorf("%q is taken as %+v", text, h)
		}
	}
}

func TestHeadersThatDifferAreNotTheSame(t *testing.T) {
	t.Parallel()
	a := someHeader()
	for name, change := range map[string]func(*Header){
		"lsn": func(h *Header) { h.Pos.LSN++ }, "i": func(h *Header) { h.Pos.Index++ }, "n": func(h *Header) {
			h.N++
		},
		"of": func(h *Header) { h.Of++ }, "due": func(h *Header) { h.Due++ }, "thru": func(h *Header) {
			h.Thru++
		}, "pull": func(h *Header) { h.Pull++ },
	} {
		b := someHeader()
		if change(&b); a.Same(&b) {
			t.Errorf("another %s is the same", name)
		}
	}
	b := someHeader()
	b.Timeline, b.ID, b.Key, b.Sort = 2, "x", "y", ByCommit
	if !a.Same(&b) {
		t.Error("timeline, id, key and sort tell no messages apart")
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(headerText)
	f.Add("v=1 lsn=0/0 i=0 n=0 of=0 due=0/0 thru=0/0 pull=0 tl=0 sort=c id= key=")
	f.Add(strings.Replace(headerText, "id=6f96", "id=aaa=~00", 1))
	f.Fuzz(func(t *testing.T, text string) {
		h, err := ParseHeader(text)
		if err != nil {
			return
		}
		back, err := ParseHeader(h.String())
		if err != nil {
			t.Fatalf("%q is read as %+v, and that is written as %q: %v", text, h, h.String(), err)
		}
		if !back.Same(&h) || back.Timeline != h.Timeline || back.Sort != h.Sort {
			t.Fatalf("%q: %+v became %+v", text, h, back)
		}
	})
}

func FuzzHeaderRoundTrip(f *testing.F) {
	f.Add(uint64(1), uint32(2), uint32(3), "id 1", "key=\n")
	f.Add(uint64(1<<64-1), uint32(1<<32-1), uint32(0), "", "é")
	f.Fuzz(func(t *testing.T, lsn uint64, i, n uint32, id, key string) {
		h := Header{Pos: Position{LSN(lsn), i}, N: int(n), Of: int(n) + 1, Due: LSN(lsn / 2), Thru: LSN(lsn),
			Timeline: i, Sort: Sort(i % 3), ID: id, Key: key}
		text := h.String()
		for j := range len(text) {
			if text[j] < ' ' || text[j] > '~' {
				t.Fatalf("byte %x in %q", text[j], text)
			}
		}
		back, err := ParseHeader(text)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(text, "=~") { // cut
			back.ID, back.Key = h.ID, h.Key
		}
		if back != h {
			t.Fatalf("%+v became %+v", h, back)
		}
	})
}

// The id as it stands in the header tells events apart, also where it was cut.
func TestIDsThatWereCutAreToldApart(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "6f9619ff-8b86", "a b=c id=d", " key=", strings.Repeat("x", 300), "=~" +
		strings.Repeat("0", 32)} {
		h := Header{ID: id, Key: "k id=other"}
		if got, want := HeaderID(h.String()), string(AppendHeaderValue(nil, id)); got != want {
			t.Errorf("%q: %q stands in the header, want %q", id, got, want)
		}
	}
	if got := HeaderID("none of ours"); got != "" {
		t.Errorf("%q", got)
	}
}

func TestNoHeaderLineIsLongerThanTheMaximum(t *testing.T) {
	t.Parallel()
	h := Header{
		Pos: Position{LSN: 1<<64 - 1, Index: 1<<32 - 1}, N: 1<<63 - 1, Of: 1<<63 - 1, Due: 1<<64 - 1,
		Thru: 1<<64 - 1, Pull: 1<<63 - 1, Timeline: 1<<32 - 1,
		Sort: ByGap, ID: "an id", Key: "a key",
		Counter: Counter{Sequence: 1<<64 - 1, First: -1 << 63, Span: 1<<32 - 1, Late: true},
	}
	if got, want := MaxHeaderLine(len("an=20id"), len("a=20key")), len(HeaderName+": "+h.String()+
		"\r\n"); got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
}

// The sum of an event id is that of its bytes, whatever the header makes of them.
func TestTheSumOfAnIDIsThatOfItsBytes(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "7", "a b=c", "ü", "\x00\xff", strings.Repeat("x", 200),
		strings.Repeat("x", 201), strings.Repeat("ü", 60), "=~" + strings.Repeat("0", 32)} {
		h := Header{ID: id, Of: 1}
		want := sha256.Sum256([]byte(id))
		if got := HeaderIDSum(h.String()); !bytes.Equal(got[:], want[:16]) {
			t.Errorf("%.20q: %x, want %x", id, got, want[:16])
		}
	}
}
