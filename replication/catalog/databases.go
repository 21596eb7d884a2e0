package catalog

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// Databases says in which database of the server things are. A record has the name that its database had when
// it was written, and ALTER DATABASE ... RENAME does not reach it.
type Databases struct {
	Own   string            // of the connection
	all   []string          // all names
	slots map[string]string // of each logical slot, its database
}

// ReadDatabases reads them.
func ReadDatabases(ctx context.Context, q Querier) (d Databases, err error) {
	err = q.QueryRow(ctx, "SELECT current_database(), ARRAY(SELECT datname::text FROM pg_database)").
		Scan(&d.Own, &d.all)
	if err != nil {
		return d, fmt.Errorf("list the databases: %w", err)
	}
	rows, err := q.Query(ctx, "SELECT slot_name::text, database::text FROM pg_replication_slots "+
		"WHERE database IS NOT NULL")
	if err == nil {
		d.slots = map[string]string{}
		var slot, database string
		_, err = pgx.ForEachRow(rows, []any{&slot, &database}, func() error {
			d.slots[slot] = database
			return nil
		})
	}
	if err != nil {
		return d, fmt.Errorf("list the replication slots: %w", err)
	}
	return d, nil
}

// HasSlot reports whether a slot of that name is in this database.
func (d Databases) HasSlot(slot string) bool { return d.slots[slot] == d.Own }

// Has reports whether what a record of this server is of may be in this database: it names this one, or its
// slot is here. Where there is no such slot, the table decides, by its OID: the database that the record
// names may have become this one, also where another one has that name now. The copy of a database has the
// OIDs of that one, and can't be told from it then. The name of the table, of a record without an OID,
// decides where there is no database of the name.
func (d Databases) Has(slot, database string, sameOID, sameName bool) bool {
	at := d.slots[slot]
	return database == d.Own || at == d.Own ||
		at == "" && (sameOID || sameName && !slices.Contains(d.all, database))
}

// Renamed reports whether a record of this server that names another database is of this one: that name is no
// more, and the table that the record is of is here.
func (d Databases) Renamed(database string, sameTable bool) bool {
	return sameTable && !slices.Contains(d.all, database)
}
