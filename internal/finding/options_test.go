package finding

import "testing"

// TestSuggestedCommandsRepeatTheOptions: each command that has settings gets those options that it lacks, and
// nothing else of a text is touched.
func TestSuggestedCommandsRepeatTheOptions(t *testing.T) {
	t.Parallel()
	o := Options{"--config '/etc/it'\\''s $1.yaml'", "--slot b", "--schema=s", "--maintain.listen=:1"}
	const all = " --config '/etc/it'\\''s $1.yaml' --slot b"
	for text, want := range map[string]string{
		"`outflow init`, or `outflow run`":        "`outflow init" + all + "`, or `outflow run" + all + "`",
		"`outflow repair --where 'a = `b`'` does": "`outflow repair --where 'a = `b`'" + all + "` does",
		"`outflow explain login`":                 "`outflow explain login`",
		"`outflow erase --help` says":             "`outflow erase --help` says",
		"`outflow parked list x`":                 "`outflow parked list x" + all + " --schema=s`",
		"`nats stream rm X` and outflow init":     "`nats stream rm X` and outflow init",
		"`outflow init --slot=a`":                 "`outflow init --slot=a --config '/etc/it'\\''s $1.yaml'`",
		"`outflow maintain`":                      "`outflow maintain" + all + " --maintain.listen=:1`",
		"`outflow --help`, or `outflow":           "`outflow --help`, or `outflow",
	} {
		if got := o.In(text); got != want {
			t.Errorf("In(%q)\n is %s\nnot %s", text, got, want)
		}
		if again := o.In(o.In(text)); again != want {
			t.Errorf("In(In(%q)) is %s", text, again)
		}
		if got := (Options)(nil).In(text); got != text {
			t.Errorf("without options In(%q) is %s", text, got)
		}
	}
}

// TestWordsAreQuotedForAShell: what a shell would change is quoted.
func TestWordsAreQuotedForAShell(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "''", "a.yaml": "a.yaml", "a b": "'a b'", "it's": `'it'\''s'`, "***": "'***'", "-x": "'-x'",
	} {
		if got := Word(text); got != want {
			t.Errorf("Word(%q) is %s, not %s", text, got, want)
		}
	}
}
