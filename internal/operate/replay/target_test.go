package replay

import "testing"

// What a transform of the target makes is compared with the live subjects: so all of it must be known.
func TestSubjectsOfATransformMustBeKnown(t *testing.T) {
	t.Parallel()
	for destination, want := range map[string]string{
		"a.b": "a.b", "a.>": "a.>", "a.$1.b": "a.*.b", "a.{{wildcard(1)}}.b": "a.*.b",
		"{{ Wildcard(1) }}.{{partition(10,1,2)}}": "*.*",
		"{{splitFromLeft(1,3)}}.x":                ">", "a.{{Split(1,-)}}": "a.>",
		"a.{{SplitFromRight(1, 2)}}.b": "a.>",
		"a.{{SliceFromLeft(1,2)}}":     "a.>",
		"a.{{split(1,.)}}.b":           "a.>", "x{{left(1,3)}}.{{right(1, .)}}.b": "*.*.b",
	} {
		if got := transformed(destination); got != want {
			t.Errorf("%s: %s, want %s", destination, got, want)
		}
	}
	if !overlap(transformed("{{split(1,-)}}"), "outbox.*") {
		t.Error("outbox-a would become outbox.a")
	}
}
