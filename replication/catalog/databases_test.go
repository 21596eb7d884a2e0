package catalog

import "testing"

// TestARecordIsOfADatabaseUnderItsFormerName: the slot says where it is, else the name and the table.
func TestARecordIsOfADatabaseUnderItsFormerName(t *testing.T) {
	t.Parallel()
	d := Databases{Own: "now", all: []string{"now", "another"},
		slots: map[string]string{"here": "now", "there": "another"}}
	for _, c := range []struct {
		slot, database                  string
		sameOID, sameName, has, renamed bool
	}{
		{"here", "now", true, true, true, false},
		{"gone", "now", false, false, true, false},
		{"here", "former", false, false, true, false},
		{"here", "another", true, true, true, false}, // a new one has the former name
		{"there", "former", true, true, false, true}, // somebody else's slot, where ours was lost
		{"gone", "former", true, true, true, true},
		{"gone", "former", false, true, true, false},   // the record has no OID
		{"gone", "former", false, false, false, false}, // a database that was dropped
		{"gone", "another", true, true, true, false},   // a new one has the name, or this one is a copy
		{"there", "another", true, true, false, false}, // this one is a copy
		{"gone", "another", false, true, false, false}, // another outbox of that name
	} {
		if has := d.Has(c.slot, c.database, c.sameOID, c.sameName); has != c.has {
			t.Errorf("%+v: %v", c, has)
		}
		if renamed := c.database != d.Own && d.Renamed(c.database, c.sameOID); renamed != c.renamed {
			t.Errorf("%+v: it was renamed: %v", c, renamed)
		}
	}
}
