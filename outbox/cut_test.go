package outbox

import (
	"fmt"
	"math"
	"strings"
	"testing"
)

const cutText = "v=1 sys=7301234567890123456 tl=3 lsn=0/16B3748 epoch=7 owner=2"

func someCut() Cut {
	return Cut{SystemID: 7301234567890123456, Timeline: 3, LSN: 0x16B3748, Epoch: 7, Owner: 2}
}

func TestCutsSurviveTheirText(t *testing.T) {
	t.Parallel()
	widest := Cut{SystemID: math.MaxUint64, Timeline: math.MaxUint32, LSN: math.MaxUint64,
		Epoch: math.MaxUint64, Owner: MaxCluster}
	for _, c := range []Cut{someCut(), widest, {SystemID: 1, LSN: 1, Epoch: 1, Owner: 1}} {
		if back, err := ParseCut(c.String()); err != nil || back != c {
			t.Errorf("%v is read back as %v, %v", &c, &back, err)
		}
	}
	c := someCut()
	if c.String() != cutText {
		t.Errorf("got %v, want %s", &c, cutText)
	}
	if back, err := ParseCut(cutText + " later=1"); err != nil || back != c {
		t.Errorf("with a later field: %v, %v", &back, err)
	}
	if n := len(widest.String()); n != 100 {
		t.Errorf("the longest cut has %d bytes", n)
	}
}

func TestMalformedCutsAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "v=1", headerText, "v=2" + cutText[3:], cutText[4:], " " + cutText, cutText + "\n", cutText + "x",
		strings.Replace(cutText, " tl=3", "", 1), strings.Replace(cutText, " ", "  ", 1),
		strings.Replace(cutText, "sys=7", "sys=07", 1), strings.Replace(cutText, "sys=", "sys=-", 1),
		strings.Replace(cutText, "sys=7301234567890123456", "sys=0", 1),
		strings.Replace(cutText, "sys=7", "sys=77", 1), strings.Replace(cutText, "tl=3", "tl=4294967296", 1),
		strings.Replace(cutText, "lsn=0/16B3748", "lsn=0/0", 1),
		strings.Replace(cutText, "lsn=0/16B3748", "lsn=0/16b3748", 1),
		strings.Replace(cutText, "lsn=0/", "lsn=", 1), strings.Replace(cutText, "epoch=7", "epoch=0", 1),
		strings.Replace(cutText, "epoch=7", "epoch=18446744073709551616", 1),
		strings.Replace(cutText, "owner=2", "owner=0", 1), strings.Replace(cutText, "owner=2", "owner=65", 1),
		strings.Replace(cutText, "owner=2", "owner=+2", 1), cutText + " " + strings.Repeat("x", maxCutText),
	} {
		if c, err := ParseCut(text); err == nil {
			t.Errorf("%q is taken as %v", text, &c)
		}
	}
}

func TestACutIsKnownBySubjectAndHeader(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		subject string
		header  map[string][]string
		is      bool
	}{
		"cut":              {CutSubject, map[string][]string{HeaderCut: {cutText}, "Nats-X": {"1"}}, true},
		"another subject":  {"outbox.cut", map[string][]string{HeaderCut: {cutText}}, false},
		"no header":        {CutSubject, nil, false},
		"malformed":        {CutSubject, map[string][]string{HeaderCut: {"v=1"}}, false},
		"twice":            {CutSubject, map[string][]string{HeaderCut: {cutText, cutText}}, false},
		"event":            {CutSubject, map[string][]string{HeaderName: {headerText}}, false},
		"cut and event":    {CutSubject, map[string][]string{HeaderCut: {cutText}, HeaderName: {""}}, false},
		"a token below it": {CutSubject + ".x", map[string][]string{HeaderCut: {cutText}}, false},
	} {
		if c := CutOf(test.subject, test.header); (c != nil) != test.is || test.is && *c != someCut() {
			t.Errorf("%s: %v", name, c)
		}
	}
}

func TestACutThatGoesBackIsTold(t *testing.T) {
	t.Parallel()
	was := someCut()
	for _, test := range []struct {
		change func(*Cut)
		back   bool
	}{
		{func(c *Cut) { c.LSN++ }, false}, {func(*Cut) {}, true}, {func(c *Cut) { c.LSN--; c.Epoch++ }, true},
		{func(c *Cut) { c.LSN--; c.Timeline++ }, false}, {func(c *Cut) { c.LSN--; c.SystemID++ }, false},
	} {
		c := was
		if test.change(&c); c.GoesBack(&was) != test.back {
			t.Errorf("%v behind %v: %v", &c, &was, !test.back)
		}
	}
	if !was.Of("7301234567890123456") || was.Of(fmt.Sprint(was.SystemID+1)) || was.Of("") {
		t.Error("a cut is of the home that it names, and of no other")
	}
}

func FuzzCut(f *testing.F) {
	f.Add(cutText)
	f.Add(cutText + " later=1")
	f.Add("v=1 sys=1 tl=0 lsn=0/1 epoch=1 owner=1")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseCut(text)
		if err != nil {
			return
		}
		back, err := ParseCut(c.String())
		if err != nil || back != c || !strings.HasPrefix(text, c.String()) {
			t.Fatalf("%q is read as %v, and that as %v, %v", text, &c, &back, err)
		}
	})
}
