package outbox

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestSubjectTemplatesMakeSubjects(t *testing.T) {
	t.Parallel()
	values := map[string]string{"doc_id": "doc 1", "actor_id": "", "type": "orders.eu west..>", "trace": ""}
	for _, test := range []struct{ template, want, columns string }{
		{"outbox", "outbox", ""},
		{"outbox.{doc_id}", "outbox.doc=201", "doc_id"},
		{"a/b.v1-{doc_id}_x.{actor_id}", "a/b.v1-doc=201_x.=", "doc_id actor_id"},
		{"a.{type:subject}.{doc_id}", "a.orders.eu=20west.=.=3E.doc=201", "type doc_id"},
		{"a.{trace:subject}", "a.=", "trace"},
		{"a.p{partition(doc_id, 10)}.{doc_id}", "a.p" + strconv.Itoa(int(partition("doc 1", 10))) +
			".doc=201", "doc_id"},
		{"a.{partition(actor_id,1)}", "a.0", "actor_id"},
	} {
		tpl, err := ParseSubjectTemplate(test.template)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := strings.Join(tpl.Columns(), " "); got != test.columns {
			t.Errorf("%s has columns %q", test.template, got)
		}
		if got := fill(tpl, values); got != test.want || !tpl.Produces(got) {
			t.Errorf("%s makes %q, want %q (produces: %v)", test.template, got, test.want, tpl.Produces(got))
		}
	}
}

func TestSubjectTemplatesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", ".", "a.", ".a", "a..b", "a b.c", "a.*", "a.>", "a.b>", "ä", "a.\x00",
		"{doc_id}", "x{doc_id}.a", "_outflow.a", "_INBOX", "$JS.API", "$x",
		"a.{}", "a.{ doc_id}", "a.{doc_id", "a.doc_id}", "a.}{", "a.{{doc_id}}", "a.{doc_id}{id}",
		"a.{doc_id}-{id}", "a.x.y{id}/",
		"a.{x:subject}.{y:subject}", "a.p{x:subject}", "a.{:subject}",
		"a.{partition(x)}", "a.{partition(x, 0)}", "a.{partition(x, -1)}", "a.{partition(x, 2}",
		"a.{partition(, 2)}", "a.{partition(x, 4294967296)}",
	} {
		if tpl, err := ParseSubjectTemplate(text); err == nil {
			t.Errorf("%q is taken: %+v", text, tpl)
		} else {
			if f := FaultOf(err); f == nil || f.Class != Usage || f.Code != "subject" {
				t.Errorf("%q: %v", text, err)
			}
		}
	}
}

func TestATemplateKnowsTheSubjectsItProduces(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		template, subject string
		want              bool
	}{
		{"outbox.{doc_id}", "OUTBOX.dead_letter", false},
		{"outbox.{doc_id}", "outbox.dead_letter", true},
		{"outbox.{doc_id}", "outbox.dead.letter", false},
		{"outbox.{doc_id}", "outbox", false},
		{"outbox.v1-{doc_id}", "outbox.v2-x", false},
		{"outbox.v1-{doc_id}", "outbox.v1-", false},
		{"a.{t:subject}.z", "a.z", false},
		{"a.{t:subject}.z", "a.b.z", true},
		{"a.{t:subject}.z", "a.b.c.z", true},
		{"a.{t:subject}.z", "a.b.c.y", false},
		{"a.{partition(d, 4)}", "a.3", true},
		{"a.{partition(d, 4)}", "a.4", false},
	} {
		tpl, err := ParseSubjectTemplate(test.template)
		if err != nil {
			t.Fatal(err)
		}
		if got := tpl.Produces(test.subject); got != test.want {
			t.Errorf("%s produces %s: %v", test.template, test.subject, got)
		}
	}
}

// A consumer finds the document of a message by its subject.
func TestATemplateFindsTheValueInASubject(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		template, subject, want string
		ok, has                 bool
	}{
		{"outbox.{doc_id}", "outbox.doc=201", "doc 1", true, true},
		{"outbox.{doc_id}", "outbox.=", "", true, true},
		{"outbox.{doc_id}", "outbox.a=2e", "", false, true}, // no encoding
		{"outbox.{doc_id}", "outbox.a.b", "", false, true},
		{"a.v1-{doc_id}-x.{doc_id:subject}", "a.v1-b-x.c.d", "b", true, true},
		{"a.{topic:subject}.{partition(doc_id, 4)}.{doc_id}", "a.b.c.3.d", "d", true, true},
		{"a.{topic:subject}.{partition(doc_id, 4)}.{doc_id}", "a.b.c.4.d", "", false, true},
		{"a.{topic:subject}.{doc_id}", "a.b..d", "", false, true},
		{"a.{topic:subject}.{doc_id}", "a.d", "", false, true},
		{"a.{actor_id}.{doc_id}", "a.b+.d", "", false, true},
		{"a.{doc_id:subject}", "a.b", "", false, false},
		{"a.{partition(doc_id, 4)}", "a.3", "", false, false},
		{"a.doc_id", "a.doc_id", "", false, false},
	} {
		tpl, err := ParseSubjectTemplate(test.template)
		if err != nil {
			t.Fatal(err)
		}
		got, ok := tpl.Value(test.subject, "doc_id")
		if has := tpl.HasToken("doc_id"); got != test.want || ok != test.ok || has != test.has {
			t.Errorf("%s in %s: %q, %v, a token: %v", test.template, test.subject, got, ok, has)
		}
	}
}

// fill makes a subject of the values that the template's columns have.
func fill(t *SubjectTemplate, values map[string]string) string {
	var in []string
	for _, c := range t.Columns() {
		in = append(in, values[c])
	}
	return string(t.Append(nil, in))
}

// FuzzSubjects: two events with other values have other subjects.
func FuzzSubjects(f *testing.F) {
	f.Add("a", "b", "a.", "b")
	f.Add("", "=", "=", "")
	f.Add(strings.Repeat("x", 300), "y", strings.Repeat("x", 299)+"y", "y")
	f.Add("=3D", "", "=", "")
	tpl, err := ParseSubjectTemplate("a.v1-{doc_id}-x.{actor_id}")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, doc, actor, doc2, actor2 string) {
		one := string(tpl.Append(nil, []string{doc, actor}))
		two := string(tpl.Append(nil, []string{doc2, actor2}))
		if (one == two) != (doc == doc2 && actor == actor2) {
			t.Fatalf("(%q, %q) makes %q, (%q, %q) makes %q", doc, actor, one, doc2, actor2, two)
		}
		if strings.Count(one, ".") != 2 {
			t.Fatalf("(%q, %q) makes %q", doc, actor, one)
		}
		for i := range len(one) {
			if one[i] <= ' ' || one[i] > '~' || one[i] == '*' || one[i] == '>' {
				t.Fatalf("(%q, %q) makes %q", doc, actor, one)
			}
		}
	})
}

// What is parsed makes subjects that hold no wildcard, no space and no empty token, begin with the literal,
// and are known.
func FuzzSubjectTemplate(f *testing.F) {
	for _, s := range []string{"outbox.{doc_id}", "a.{b:subject}.c", "a.x{partition(d, 5)}y", "a.{b}.{b}",
		"a.{", "é"} {
		f.Add(s, "doc. 1*>")
		f.Add(s, "")
	}
	f.Fuzz(func(t *testing.T, text, value string) {
		tpl, err := ParseSubjectTemplate(text)
		if err != nil {
			return
		}
		if tpl.String() != text {
			t.Fatalf("%q became %q", text, tpl)
		}
		values := slices.Repeat([]string{value}, len(tpl.Columns()))
		subject := string(tpl.Append(nil, values))
		tokens := strings.Split(subject, ".")
		if slices.Contains(tokens, "") && len(subject) <= MaxSubject ||
			strings.ContainsAny(subject, "*> \r\n\t\x00") {
			t.Fatalf("%q makes of %q the subject %q", text, value, subject)
		}
		if first, _, _ := strings.Cut(text, "."); tokens[0] != first {
			t.Fatalf("%q makes %q", text, subject)
		}
		if len(subject) <= MaxSubject && !tpl.Produces(subject) {
			t.Fatalf("%q made %q but says it can't", text, subject)
		}
		for _, column := range tpl.Columns() {
			encoded := string(AppendToken(nil, value))
			got, ok := tpl.Value(subject, column)
			want, _ := ParseToken(encoded)
			if len(subject) <= MaxSubject && (ok != tpl.HasToken(column) || ok && got != want) {
				t.Fatalf("%q: in %s, made of %q, %s is %q, %v", text, subject, value, column, got, ok)
			}
		}
	})
}
