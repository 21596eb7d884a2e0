package catalog

import "testing"

// TestARecordIsOfADatabaseUnderItsFormerName: the slot says where it is, else the name and the table.
func TestARecordIsOfADatabaseUnderItsFormerName(t *testing.T) {
	t.Parallel()
	d := Databases{Own: "now", all: []string{"now", "another"},
		slots: map[string]string{"here": "now", "there": "another"}}
	for _, c := range []struct {
		slot, database          string
		sameTable, has, renamed bool
	}{
		{"here", "now", true, true, false},
		{"gone", "now", false, true, false},
		{"here", "former", false, true, false},
		{"here", "another", true, true, false}, // a new one has the former name
		{"there", "former", true, false, true}, // somebody else's slot, where ours was lost
		{"gone", "former", true, true, true},
		{"gone", "former", false, false, false}, // a database that was dropped
		{"gone", "another", true, false, false}, // the copy of a database
	} {
		if has := d.Has(c.slot, c.database, c.sameTable); has != c.has {
			t.Errorf("%+v: %v", c, has)
		}
		if renamed := c.database != d.Own && d.Renamed(c.database, c.sameTable); renamed != c.renamed {
			t.Errorf("%+v: it was renamed: %v", c, renamed)
		}
	}
}
