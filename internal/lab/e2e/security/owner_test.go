package security

import (
	"fmt"
	"net/url"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestWhatStrangersMadeIsRefused: init takes no table that anybody can have made, and init --sql-api neither
// a schema nor a function nor counters whose owner could change them later. It says whose they are, and takes
// them where that role is named.
func TestWhatStrangersMadeIsRefused(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		ns := natstest.Server(t)
		o, conn, raw := harness.Install(t, srv, ns.URL(), "owners")
		database := harness.Value[string](t, conn, "SELECT current_database()")
		mallory := "stranger_" + database
		harness.Exec(t, conn, "CREATE ROLE "+mallory+" LOGIN")
		t.Cleanup(func() { dropRole(t, raw, mallory) })
		harness.Exec(t, conn, "GRANT CREATE ON DATABASE "+database+" TO "+mallory)
		harness.Exec(t, conn, "GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC")
		as := func(sql string) {
			t.Helper()
			harness.Exec(t, conn, "SET ROLE "+mallory)
			harness.Exec(t, conn, sql)
			harness.Exec(t, conn, "RESET ROLE")
		}
		refused := func(what string, args ...string) {
			t.Helper()
			o.MustFail(3, args, what, `"`+mallory+`"`, "--accept-owner "+mallory)
		}

		// A table that was prepared where everybody may create.
		as(fmt.Sprintf(outboxOf, "public.outbox"))
		refused(`table "public"."outbox"`, "init")
		n := harness.Value[int](t, conn, "SELECT count(*) FROM pg_publication")
		if n != 0 {
			t.Error("a publication was made for it")
		}
		o.MustRun("init", "--accept-owner", mallory)

		// Where not everybody may create, the owner has the right from somebody.
		harness.Exec(t, conn, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
		o.Init()

		// The database's owner, and that of the table, may have the rest; nobody else.
		harness.Exec(t, conn, "ALTER TABLE public.outbox OWNER TO postgres")
		as("CREATE SCHEMA outflow")
		refused("schema outflow", "init", "--sql-api")
		harness.Exec(t, conn, "ALTER SCHEMA outflow OWNER TO postgres")
		harness.Exec(t, conn, "GRANT CREATE, USAGE ON SCHEMA outflow TO "+mallory)
		as("CREATE FUNCTION outflow.enqueue(doc_id text, actor_id text, counter bigint, payload jsonb, " +
			"columns jsonb DEFAULT NULL) " +
			"RETURNS text LANGUAGE sql AS 'SELECT NULL::text'")
		refused("function outflow.enqueue(", "init", "--sql-api")
		harness.Exec(t, conn, "DROP FUNCTION outflow.enqueue")
		harness.Exec(t, conn, "GRANT CREATE ON SCHEMA public TO "+mallory)
		as(
			`CREATE TABLE public.outflow_counter (doc_id text, actor_id text, counter bigint,
				PRIMARY KEY (doc_id, actor_id))`)
		refused("table public.outflow_counter", "init", "--sql-api")
		harness.Must(t, conn.QueryRow(t.Context(),
			"SELECT count(*) FROM pg_proc WHERE proname = 'enqueue'").Scan(&n))
		if n != 0 {
			t.Error("the function was made beside them")
		}
		harness.Exec(t, conn, "ALTER DATABASE "+database+" OWNER TO "+mallory)
		o.MustRun("init", "--sql-api")
		harness.Exec(t, conn, "ALTER DATABASE "+database+" OWNER TO postgres")
		harness.Exec(t, conn, "ALTER TABLE public.outbox OWNER TO "+mallory)
		o.MustRun("init", "--sql-api")

		// A role that is no superuser trusts those that it was made a member of.
		harness.Exec(t, conn, "ALTER TABLE public.outbox OWNER TO postgres")
		member := "member_" + database
		harness.Exec(t, conn, "CREATE ROLE "+member+" LOGIN REPLICATION")
		t.Cleanup(func() { dropRole(t, raw, member) })
		u, err := url.Parse(raw)
		harness.Must(t, err)
		u.User = url.User(member)
		o.Set("POSTGRES_URL=" + u.String())
		harness.Exec(t, conn, "GRANT CREATE ON SCHEMA public TO PUBLIC")
		harness.Exec(t, conn, "ALTER TABLE public.outbox OWNER TO "+mallory)
		refused(`table "public"."outbox"`, "init")
		harness.Exec(t, conn, "GRANT "+mallory+" TO "+member)
		o.Init()
	})
}

const outboxOf = `CREATE TABLE %s (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL,
	actor_id text NOT NULL,
	counter bigint NOT NULL, seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS
	AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
	payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())`
