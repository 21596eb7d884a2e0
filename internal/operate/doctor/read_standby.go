package doctor

import (
	"context"
	"maps"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/replication/postgres"
)

// Standby is a server that is to become the primary.
type Standby struct {
	*Server
	Settings map[string]string
	Slots    []Slot
	SystemID string
	Behind   int64 // bytes of WAL that it has received and not replayed, -1: not known
}

func (r *reader) readStandby(ctx context.Context) error {
	target := postgres.Target{Setting: "--standby", URL: r.o.Standby}
	defer progress.Wait(ctx, "waiting for the standby: "+target.String())()
	conn, err := target.Connect(ctx)
	if err != nil {
		return err
	}
	defer postgres.Close(conn)
	s := &Standby{Settings: map[string]string{}}
	if s.Server, err = readServer(ctx, conn); err != nil {
		return err
	}
	settings, err := readSettings(ctx, conn)
	if err != nil {
		return err
	}
	maps.Copy(s.Settings, settings)
	if s.Slots, err = readSlots(ctx, conn, r.f.Config.Slot); err != nil {
		return err
	}
	var more struct {
		System string `json:"system"`
		Behind int64  `json:"behind"`
	}
	if err := query(ctx, conn, &more, one(`SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system,
		coalesce(greatest(pg_last_wal_receive_lsn() - pg_last_wal_replay_lsn(), 0), -1) AS behind`)); err != nil {
		return err
	}
	s.SystemID, s.Behind = more.System, more.Behind
	r.f.Standby = s
	return nil
}
