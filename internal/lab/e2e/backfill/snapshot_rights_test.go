package backfill

import (
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestASnapshotNamesTheRightsItLacks: a snapshot, also one that goes on after a kill, needs what
// docs/postgres.md and docs/nats.md say; what is missing is named, with what grants it.
func TestASnapshotNamesTheRightsItLacks(t *testing.T) {
	harness.SkipIfShort(t)
	t.Parallel()
	var users []*server.User
	for _, u := range harness.AccountsConfig(t).Users {
		if u.Username == "outflow" || u.Username == "outflow-init" {
			users = append(users, u)
		}
	}
	if len(users) != 2 {
		t.Fatalf("%d users", len(users))
	}
	const stream = "OUTBOX" // that of the page
	both := &server.User{Username: "snapshot", Password: "documented", Permissions: &server.Permissions{
		Publish: &server.SubjectPermission{Allow: slices.Concat(users[0].Permissions.Publish.Allow,
			users[1].Permissions.Publish.Allow, []string{
				"$JS.API.STREAM.UPDATE." + stream, "$JS.API.CONSUMER.CREATE." + stream + ".>",
				"$JS.API.CONSUMER.MSG.NEXT." + stream + ".>",
				"$JS.API.CONSUMER.DELETE." + stream + ".>", "$JS.API.CONSUMER.INFO." + stream + ".>",
			})},
		Subscribe: &server.SubjectPermission{Allow: slices.Concat(users[0].Permissions.Subscribe.Allow,
			users[1].Permissions.Subscribe.Allow)},
	}}
	ns := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.Users = []*server.User{both}
	}})
	url := pgtest.Database(t, pgtest.Server(t))
	o, conn := harness.New(t, url, ns.URL(), "outflow", "NATS_USER=snapshot",
		"NATS_PASSWORD=documented"), harness.Connect(t, url)
	o.Slot = harness.SlotName("rights")
	o.Set("SLOT="+o.Slot, "PUBLICATION="+o.Slot)
	harness.Exec(t, conn, harness.GeneratedKey)
	for i := range 5 {
		harness.Insert(t, conn, "doc", i, "{}")
	}
	role := o.Slot
	harness.Exec(t, conn, "CREATE ROLE "+role+" LOGIN REPLICATION")
	harness.Exec(t, conn, "REVOKE ALL ON DATABASE "+conn.Config().Database+
		" FROM PUBLIC; GRANT CONNECT ON DATABASE "+conn.Config().Database+" TO "+role)
	harness.Exec(t, conn, "CREATE PUBLICATION "+o.Slot+
		" FOR TABLE outbox WITH (publish = 'insert', publish_via_partition_root = true)")
	o.Set("POSTGRES_URL=" + strings.Replace(url, "postgres@", role+"@", 1))
	o.MustFail(3, []string{"init", "--snapshot"}, "may not read table public.outbox", "GRANT SELECT ON")
	harness.Exec(t, conn, "GRANT SELECT ON outbox TO "+role)
	f := &harness.Installation{Outflow: o, Conn: conn, URL: url}
	f.KillSnapshotAt(t, "snapshot.row:3")
	o.MustFail(3, []string{"init", "--snapshot"}, "temporary table", "GRANT TEMPORARY ON DATABASE")
	harness.Exec(t, conn, "GRANT TEMPORARY ON DATABASE "+conn.Config().Database+" TO "+role)
	if r := o.MustSnapshot(); r.Already == 0 || r.Already+r.Published != 5 {
		t.Errorf("%+v", r)
	}
}
