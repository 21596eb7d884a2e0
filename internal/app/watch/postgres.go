package watch

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outflowhq/outflow/internal/finding"
	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/replication/catalog"
	"github.com/outflowhq/outflow/replication/postgres"
)

// postgresSide reads PostgreSQL. It belongs to one goroutine.
type postgresSide struct {
	w    *Watcher
	conn *pgx.Conn // nil: none is open
	rate walRate

	reading int    // how many this connection has had
	said    string // what its name says that this process waits at
}

func (p *postgresSide) read(ctx context.Context) error {
	if p.conn == nil {
		conn, err := postgres.Target{URL: p.w.cfg.Postgres.URL, Slot: p.w.cfg.Slot,
			Command: p.w.cfg.Command}.Connect(ctx,
			func(c *pgx.ConnConfig) {
				c.RuntimeParams["default_transaction_read_only"] = "on"
				c.RuntimeParams["statement_timeout"] = strconv.FormatInt(timeLimit.Milliseconds(), 10)
			})
		if err != nil {
			return err
		}
		p.conn, p.reading, p.said = conn, 0, ""
	}
	asked := time.Now()
	var standby bool
	var text string
	err := p.conn.QueryRow(ctx, `SELECT r.recovery, CASE WHEN r.recovery THEN coalesce(
			greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()), '0/0')
			ELSE pg_current_wal_lsn() END::text
		FROM (SELECT pg_is_in_recovery() AS recovery) r`).Scan(&standby, &text)
	if err != nil {
		return fmt.Errorf("read the end of WAL: %w", err)
	}
	roundTrip := time.Since(asked)
	end, err := outbox.ParseLSN(text)
	if err != nil {
		return fmt.Errorf("read the end of WAL: %w", err)
	}
	slot, err := catalog.ReadSlot(ctx, p.conn, p.w.cfg.Slot)
	if err != nil {
		return err
	}
	if err := p.say(ctx, slot.Active); err != nil {
		return err
	}
	waiting, err := ReadWaiting(ctx, p.conn, p.w.cfg.Slot)
	if err != nil {
		return err
	}
	instances, err := p.instances(ctx)
	if err != nil {
		return err
	}
	subscribers, err := p.subscribers(ctx, end)
	if err != nil {
		return err
	}
	now := time.Now()
	p.rate.add(end, asked)
	version, _, _ := strings.Cut(p.conn.PgConn().ParameterStatus("server_version"), " ")
	p.w.update(func(r *Reading) {
		r.Postgres = Postgres{Host: p.host(), Version: version, Standby: standby, RoundTrip: roundTrip,
			WALEnd: end, WALRate: p.rate.perSecond(), Certificates: p.certificates()}
		r.Slot, r.Instances, r.Subscribers = slotOf(&slot, end), instances, subscribers
		r.Slot.WaitsAt = waiting.Code
		r.Postgres.fresh(now)
		r.Slot.fresh(now)
	})
	if p.w.cfg.Seen != nil {
		p.w.cfg.Seen(end, slot, asked)
	}
	if p.reading++; p.w.cfg.Partitions != nil && p.reading%listEvery == 1 {
		p.partitions(ctx)
	}
	return nil
}

// How long the partitions may take. A lock that somebody holds on one of them is waited for even less.
const partitionsTime, partitionsLock = time.Second, 200 * time.Millisecond

// ReadPartitions reads the outbox's partitions within a short time, by which the connection is not lost.
func ReadPartitions(ctx context.Context, conn *pgx.Conn,
	read func(context.Context, catalog.Querier) (Partitions, error)) (found Partitions, err error) {
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL statement_timeout = %d; SET LOCAL lock_timeout = %d",
			partitionsTime.Milliseconds(), partitionsLock.Milliseconds()))
		if err == nil {
			found, err = read(ctx, tx)
		}
		return err
	})
	found.fresh(time.Now())
	return found, err
}

// partitions reads the outbox's partitions. Without them everything else is still true, so an error is only
// said beside them.
func (p *postgresSide) partitions(ctx context.Context) {
	found, err := ReadPartitions(ctx, p.conn, p.w.cfg.Partitions)
	p.w.update(func(r *Reading) {
		if err != nil {
			r.Partitions.failed(err, time.Now())
			return
		}
		r.Partitions = found
	})
}

// say tells by this connection's name at what this process waits. The name ends with the process.
func (p *postgresSide) say(ctx context.Context, held bool) error {
	if p.w.cfg.Waits == nil {
		return nil
	}
	code := p.w.cfg.Waits(held)
	if code == p.said {
		return nil
	}
	name := p.name()
	if waits := postgres.WaitsName(p.w.cfg.Slot, code); code != "" && waits != "" {
		name = waits
	}
	if _, err := p.conn.Exec(ctx, "SELECT pg_catalog.set_config('application_name', $1, false)",
		name); err != nil {
		return fmt.Errorf("name the connection: %w", err)
	}
	p.said = code
	return nil
}

// name is the connection's name while there is nothing to say.
func (p *postgresSide) name() string { return p.conn.Config().RuntimeParams["application_name"] }

// Waiting is at what an outflow run waits instead of publishing, as it says itself.
type Waiting struct {
	Code string // "": none says so
}

// waitingFor is how old what is said may be: who waits reads several times as often. The connection of a host
// that is gone stays for hours.
const waitingFor = time.Minute

// ReadWaiting reads what is said for a slot. Any role may name its connection so: a code at which outflow run
// does not wait is passed over.
func ReadWaiting(ctx context.Context, q catalog.Querier, slot string) (Waiting, error) {
	return readWaiting(ctx, q, slot, waitingFor)
}

func readWaiting(ctx context.Context, q catalog.Querier, slot string, within time.Duration) (w Waiting,
	err error) {
	rows, err := q.Query(ctx, `SELECT substr(application_name, length($1::text) + 1)
		FROM pg_catalog.pg_stat_activity
		WHERE datname = current_database() AND starts_with(application_name, $1) AND coalesce(
			state_change > clock_timestamp() - make_interval(secs => $2), true) ORDER BY 1 DESC`,
		postgres.WaitsPrefix(slot), within.Seconds())
	var said []Waiting
	if err == nil {
		said, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Waiting])
	}
	if err != nil {
		return w, fmt.Errorf("read what outflow run waits at: %w", err)
	}
	for _, one := range said {
		if f, ok := finding.Of(one.Code); ok && slices.Contains(f.Classes, outbox.Transient) {
			w = one
		}
	}
	return w, nil
}

// instances reads who is connected for this slot for longer than most commands run. This connection is of its
// host, whatever it says, and one of another process that waits is listed where that has no other.
func (p *postgresSide) instances(ctx context.Context) ([]Instance, error) {
	rows, err := p.conn.Query(ctx, `SELECT trim(name || ' ' || coalesce(host(client_addr), '')),
			min(backend_start), bool_or(name = $2 AND client_addr IS NOT DISTINCT FROM inet_client_addr())
		FROM (SELECT *, bool_and(starts_with(name, $3)) OVER (PARTITION BY client_addr) AS alone
			FROM (SELECT CASE pid WHEN pg_backend_pid() THEN $2 ELSE application_name END AS name,
				client_addr, backend_start FROM pg_stat_activity) every
			WHERE starts_with(name, $1) OR starts_with(name, $3)) named
		WHERE backend_start < now() - interval '10 seconds' AND (alone OR NOT starts_with(name, $3))
		GROUP BY 1 ORDER BY 1 LIMIT 16`, postgres.NamePrefix(p.w.cfg.Slot), p.name(),
		postgres.WaitsPrefix(p.w.cfg.Slot))
	if err != nil {
		return nil, fmt.Errorf("read who is connected: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Instance])
	if err != nil {
		return nil, fmt.Errorf("read who is connected: %w", err)
	}
	return all, nil
}

// maxSubscribers is how many are read at most.
const maxSubscribers = 64

// subscribers reads which slots of other programs keep WAL of this database, of several active ones.
func (p *postgresSide) subscribers(ctx context.Context, end outbox.LSN) ([]Subscriber, error) {
	if p.w.cfg.Cluster.ID == 0 {
		return nil, nil
	}
	// Of a slot that is lost nothing is kept. Other Outflows show their own. The walsender of a subscription
	// is named like the subscription, which may begin with outflow too.
	rows, err := p.conn.Query(ctx, `SELECT s.slot_name, s.active,
			greatest(coalesce($1::pg_lsn - s.restart_lsn, 0), 0)::bigint,
			coalesce(s.wal_status = 'lost', false)
		FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
		WHERE s.plugin = 'pgoutput' AND s.database = current_database() AND NOT s.temporary
			AND s.slot_name <> $2 AND NOT starts_with(coalesce(a.application_name, ''), $4)
		ORDER BY 3 DESC, 1 LIMIT $3`, end.String(), p.w.cfg.Slot, maxSubscribers, postgres.Name)
	if err != nil {
		return nil, fmt.Errorf("read the slots of others: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Subscriber])
	if err != nil {
		return nil, fmt.Errorf("read the slots of others: %w", err)
	}
	return all, nil
}

func slotOf(s *relay.SlotState, end outbox.LSN) Slot {
	slot := Slot{
		Exists: s.Exists, Active: s.Active, PID: s.ActivePID, Holder: s.Holder, Restart: s.Restart,
		Confirmed: s.Confirmed, WALStatus: s.WALStatus, Invalidation: s.Invalidation,
	}
	if s.Restart != 0 { // else nothing is kept: the slot is lost, or there is none
		slot.Retained = outbox.Distance(s.Restart, end)
	}
	if s.Exists && s.SafeWALSize >= 0 {
		slot.Safe = &s.SafeWALSize
	}
	return slot
}

func (p *postgresSide) failed(err error, now time.Time) {
	p.w.update(func(r *Reading) {
		r.Postgres.failed(err, now)
		r.Slot.failed(err, now)
		if p.w.cfg.Partitions != nil {
			r.Partitions.failed(err, now)
		}
	})
}

func (p *postgresSide) close() {
	if p.conn != nil {
		postgres.Close(p.conn)
		p.conn = nil
	}
}

func (p *postgresSide) certificates() []Certificate {
	conn, ok := p.conn.PgConn().Conn().(*tls.Conn)
	if !ok {
		return nil
	}
	return Certificates(conn.ConnectionState().PeerCertificates, p.conn.Config().TLSConfig, nil)
}

// host says where the connection ended: by name if the URL has one server, else by address.
func (p *postgresSide) host() string {
	c := p.conn.Config()
	host := net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port)))
	for _, other := range c.Fallbacks {
		if other.Host != c.Host || other.Port != c.Port {
			host = p.conn.PgConn().Conn().RemoteAddr().String()
		}
	}
	return host + "/" + c.Database
}

// walRate measures how fast WAL is written, over ratePeriod: checkpoints make the rate of a shorter time too
// uneven to tell when a slot is lost.
type walRate struct{ samples []walSample }

type walSample struct {
	at  time.Time
	end outbox.LSN
}

const (
	ratePeriod = 5 * time.Minute
	rateSample = 10 * time.Second
)

func (r *walRate) add(end outbox.LSN, at time.Time) {
	n := len(r.samples)
	if n > 0 && end < r.samples[n-1].end { // another server, or one that was restored
		r.samples, n = nil, 0
	}
	if n > 1 && at.Sub(r.samples[n-2].at) < rateSample { // the newest one stands for the time since
		n--
	}
	r.samples = append(r.samples[:n], walSample{at, end})
	for len(r.samples) > 2 && at.Sub(r.samples[1].at) > ratePeriod {
		r.samples = r.samples[1:]
	}
}

// perSecond returns 0 until there is a time to measure over.
func (r *walRate) perSecond() float64 {
	if len(r.samples) < 2 {
		return 0
	}
	first, last := r.samples[0], r.samples[len(r.samples)-1]
	took := last.at.Sub(first.at)
	if took < rateSample {
		return 0
	}
	return float64(outbox.Distance(first.end, last.end)) / took.Seconds()
}
