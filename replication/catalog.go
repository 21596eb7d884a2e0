package replication

import (
	"context"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/replication/catalog"
)

// Slot reads the slot's row in pg_replication_slots. A slot that does not exist is the zero value and no
// error.
func (s *Session) Slot(ctx context.Context) (relay.SlotState, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return relay.SlotState{}, err
	}
	defer unlock()
	return catalog.ReadSlot(ctx, s.conn, s.cfg.Slot)
}

// Publication reads the publication and checks that it publishes every insert into the outbox, with the
// columns named: those that are needed. (Below PostgreSQL 18 a generated one can't be among them.) What is
// wrong is a fatal fault with one of the codes publication_missing, publication_table, publication_insert,
// publication_update, publication_filter, publication_columns, publication_root, or one of those of the
// table. What hides rows and leaves no trace once it is mended is the identity's Hidden: table_unlogged,
// publication_partition, publication_root.
//
// It is read from the catalog's own rows, prattrs and prqual among them; that takes no right on the table.
func (s *Session) Publication(ctx context.Context, columns []string) (relay.PublicationIdentity, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return relay.PublicationIdentity{}, err
	}
	defer unlock()
	return catalog.CheckPublication(ctx, s.conn, s.version, s.cfg.Config, columns)
}

// Cluster reads what the catalog says of the control table and the subscription.
func (s *Session) Cluster(ctx context.Context) (catalog.Cluster, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return catalog.Cluster{}, err
	}
	defer unlock()
	return catalog.ReadCluster(ctx, s.conn, s.version, s.cfg.Config)
}

// Databases reads in which database of the server things are.
func (s *Session) Databases(ctx context.Context) (catalog.Databases, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return catalog.Databases{}, err
	}
	defer unlock()
	return catalog.ReadDatabases(ctx, s.conn)
}

// Table reads the outbox's description.
func (s *Session) Table(ctx context.Context) (catalog.Table, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return catalog.Table{}, err
	}
	defer unlock()
	return catalog.ReadTable(ctx, s.conn, s.cfg.Table)
}
