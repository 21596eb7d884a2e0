package e2e

import (
	"fmt"
	"net/url"
	"testing"

	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgserver"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// TestWhatStrangersMadeIsRefused: init takes no table that anybody can have made, and init --sql-api neither a schema nor a function nor
// counters whose owner could change them later. It says whose they are, and takes them where that role is named.
func TestWhatStrangersMadeIsRefused(t *testing.T) {
	t.Parallel()
	pgtest.Each(t, func(t *testing.T, srv *pgserver.Server) {
		t.Parallel()
		ns := natstest.Server(t)
		o, conn, raw := installation(t, srv, ns.URL(), "owners")
		var database string
		must(t, conn.QueryRow(t.Context(), "SELECT current_database()").Scan(&database))
		mallory := "stranger_" + database
		mustExec(t, conn, "CREATE ROLE "+mallory+" LOGIN")
		t.Cleanup(func() { dropRole(t, raw, mallory) })
		mustExec(t, conn, "GRANT CREATE ON DATABASE "+database+" TO "+mallory)
		mustExec(t, conn, "GRANT CREATE, USAGE ON SCHEMA public TO PUBLIC")
		as := func(sql string) {
			t.Helper()
			mustExec(t, conn, "SET ROLE "+mallory)
			mustExec(t, conn, sql)
			mustExec(t, conn, "RESET ROLE")
		}
		refused := func(what string, args ...string) {
			t.Helper()
			o.fails(3, args, what, `"`+mallory+`"`, "--accept-owner "+mallory)
		}

		// A table that was prepared where everybody may create.
		as(fmt.Sprintf(outboxOf, "public.outbox"))
		refused(`table "public"."outbox"`, "init")
		var n int
		must(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_publication").Scan(&n))
		if n != 0 {
			t.Error("a publication was made for it")
		}
		if out, errOut, code := o.exec("init", "--accept-owner", mallory); code != 0 {
			t.Errorf("its owner was named: exit code %d\n%s%s", code, out, errOut)
		}

		// Where not everybody may create, the owner has the right from somebody.
		mustExec(t, conn, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
		o.init()

		// The database's owner, and that of the table, may have the rest; nobody else.
		mustExec(t, conn, "ALTER TABLE public.outbox OWNER TO postgres")
		as("CREATE SCHEMA outflow")
		refused("schema outflow", "init", "--sql-api")
		mustExec(t, conn, "ALTER SCHEMA outflow OWNER TO postgres")
		mustExec(t, conn, "GRANT CREATE, USAGE ON SCHEMA outflow TO "+mallory)
		as("CREATE FUNCTION outflow.enqueue(doc_id text, actor_id text, counter bigint, payload jsonb, columns jsonb DEFAULT NULL) " +
			"RETURNS text LANGUAGE sql AS 'SELECT NULL::text'")
		refused("function outflow.enqueue(", "init", "--sql-api")
		mustExec(t, conn, "DROP FUNCTION outflow.enqueue")
		mustExec(t, conn, "GRANT CREATE ON SCHEMA public TO "+mallory)
		as(`CREATE TABLE public.outflow_counter (doc_id text, actor_id text, counter bigint, PRIMARY KEY (doc_id, actor_id))`)
		refused("table public.outflow_counter", "init", "--sql-api")
		must(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_proc WHERE proname = 'enqueue'").Scan(&n))
		if n != 0 {
			t.Error("the function was made beside them")
		}
		mustExec(t, conn, "ALTER DATABASE "+database+" OWNER TO "+mallory)
		if out, errOut, code := o.exec("init", "--sql-api"); code != 0 {
			t.Errorf("the database is his: exit code %d\n%s%s", code, out, errOut)
		}
		mustExec(t, conn, "ALTER DATABASE "+database+" OWNER TO postgres")
		mustExec(t, conn, "ALTER TABLE public.outbox OWNER TO "+mallory)
		if out, errOut, code := o.exec("init", "--sql-api"); code != 0 {
			t.Errorf("the outbox is his: exit code %d\n%s%s", code, out, errOut)
		}

		// A role that is no superuser trusts those that it was made a member of.
		mustExec(t, conn, "ALTER TABLE public.outbox OWNER TO postgres")
		member := "member_" + database
		mustExec(t, conn, "CREATE ROLE "+member+" LOGIN REPLICATION")
		t.Cleanup(func() { dropRole(t, raw, member) })
		u, err := url.Parse(raw)
		must(t, err)
		u.User = url.User(member)
		o.set("POSTGRES_URL=" + u.String())
		mustExec(t, conn, "GRANT CREATE ON SCHEMA public TO PUBLIC")
		mustExec(t, conn, "ALTER TABLE public.outbox OWNER TO "+mallory)
		refused(`table "public"."outbox"`, "init")
		mustExec(t, conn, "GRANT "+mallory+" TO "+member)
		o.init()
	})
}

const outboxOf = `CREATE TABLE %s (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), doc_id text NOT NULL, actor_id text NOT NULL,
	counter bigint NOT NULL, seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
	payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())`
