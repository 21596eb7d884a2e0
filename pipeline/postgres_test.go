package pipeline

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

const (
	timeline = 1
	systemID = "7361530121234511111"
)

var errDown = errors.New("the connection is gone")

// postgres is a server with one slot. The harness's lock guards it.
type postgres struct {
	w   *harness
	rnd *rand.Rand

	wal     []*transaction
	end     outbox.LSN    // of the WAL
	grown   chan struct{} // closed when it grows
	payload uint32        // type of the payload column
	control bool          // rows of the control table stand for logical messages
	slots   []*postgres   // the same server for further slots, each with a lock of its own

	slot        relay.SlotState
	active      *postgresConn
	confirmed   outbox.LSN
	earlier     []outbox.LSN // what was confirmed before
	confirmedAt []moment
	identity    relay.PublicationIdentity
	systemID    string
	recovery    bool

	down       time.Time     // nothing can connect until then
	delay      time.Duration // between batches
	quiet      bool          // it sends no keepalive by itself
	writeDelay time.Duration
	writeFails int         // so many of the next writes fail,
	failsLate  bool        // though they are in the WAL
	ticks      []time.Time // that the pipeline wrote
	changes    []relay.Settings
	watermarks []relay.Watermark
	onConfirm  func(outbox.LSN)
	rows       rowFaults
}

// moment is when an LSN was reached.
type moment struct {
	at  time.Time
	lsn outbox.LSN
}

func newPostgres(w *harness, seed uint64) *postgres {
	return &postgres{
		w: w, rnd: rand.New(rand.NewPCG(seed, 1)), end: 0x1000000, grown: make(chan struct{}),
		payload: oidText, systemID: systemID,
		confirmed: 0x1000000, writeDelay: 300 * time.Microsecond,
		slot: relay.SlotState{Exists: true, Plugin: "pgoutput", Database: "app", WALStatus: "reserved",
			SafeWALSize: -1},
		identity: relay.PublicationIdentity{OID: 16401, Xmin: 730, RelOID: 16402, RelXmin: 730,
			TableOID: tableOID},
	}
}

// commitTime is the server's clock, as commit timestamps have it.
func commitTime(t time.Time) int64 {
	return t.Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).Microseconds()
}

// commit appends a transaction. The lock is held.
func (pg *postgres) commit(rows []row, messages ...logical) *transaction {
	return pg.commitAt(time.Now(), rows, messages...)
}

func (pg *postgres) commitAt(at time.Time, rows []row, messages ...logical) *transaction {
	return pg.log(&transaction{rows: rows, logical: messages, time: commitTime(at), control: pg.control})
}

// log appends a transaction that has no position yet.
func (pg *postgres) log(x *transaction) *transaction {
	rows := x.rows
	x.start = pg.end + outbox.LSN(48+64*len(rows))
	x.end = x.start + 48
	pg.wal = append(pg.wal, x)
	for _, slot := range pg.slots {
		slot.w.with(func() { slot.wal = append(slot.wal, x) })
	}
	pg.grow(x.end)
	pg.w.step("committed", uint64(x.end))
	return x
}

// grow moves the end of the WAL; by itself, it is what other databases write.
func (pg *postgres) grow(end outbox.LSN) {
	pg.end = end
	close(pg.grown)
	pg.grown = make(chan struct{})
	for _, slot := range pg.slots {
		slot.w.with(func() { slot.grow(end) })
	}
}

// crash lets the slot go back to what was on disk, and ends all connections.
func (pg *postgres) crash() {
	if n := len(pg.earlier); n > 0 {
		pg.confirmed = pg.earlier[pg.rnd.IntN(n)]
	}
	for _, u := range pg.w.postgresConns() {
		u.cut(true)
	}
	for _, slot := range pg.slots {
		slot.w.with(slot.crash)
	}
}

// from is where replication has to start for a checkpoint of the home.
func (pg *postgres) from(p relay.Checkpoint) outbox.LSN {
	if pg != pg.w.other {
		return p.Start()
	}
	for _, x := range pg.wal {
		if x.home > p.Published() && x.input() {
			return x.start
		}
	}
	return pg.end
}

func (pg *postgres) settle(lsn outbox.LSN) {
	if lsn <= pg.confirmed {
		return
	}
	pg.earlier = append(pg.earlier, pg.confirmed)
	pg.confirmed = lsn
	pg.confirmedAt = append(pg.confirmedAt, moment{time.Now(), lsn})
	pg.w.checkConfirmed(pg, lsn)
	if pg.onConfirm != nil {
		pg.onConfirm(lsn)
	}
	pg.w.step("confirmed", uint64(lsn))
}

// postgresConn is the PostgreSQL side of a session.
type postgresConn struct {
	pg      *postgres
	batches chan *relay.Batch
	gone    chan struct{} // closed when the connection is
	dead    bool
	err     error
	started bool
	stopped bool // in order
	report  outbox.LSN
	timer   bool
	binary  bool
	from    outbox.LSN
	sent    outbox.LSN // newest marker
	taken   int        // batches handed out

	noise  *noise
	lag    time.Duration // questions take up to so much longer
	frozen time.Time     // the process that owns it sleeps until then
}

func (u *postgresConn) lock()   { u.pg.w.mu.Lock() }
func (u *postgresConn) unlock() { u.pg.w.mu.Unlock() }

// ask takes the time of one question.
func (u *postgresConn) ask(ctx context.Context) error {
	u.lock()
	d := u.noise.about(max(200*time.Microsecond, time.Until(u.frozen)) + u.noise.upTo(u.lag))
	u.unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return ctx.Err()
	case <-u.gone:
	}
	u.lock()
	defer u.unlock()
	if u.dead || time.Now().Before(u.pg.down) {
		return errDown
	}
	return nil
}

func (u *postgresConn) Server(ctx context.Context) (relay.ServerState, error) {
	err := u.ask(ctx)
	u.lock()
	defer u.unlock()
	return relay.ServerState{
		SystemID: u.pg.systemID, Database: "app", Version: 180000, History: relay.History{Timeline: timeline},
		WALEnd: u.pg.end, InRecovery: u.pg.recovery, WALSenderTimeout: time.Minute,
	}, err
}

func (u *postgresConn) Slot(ctx context.Context) (relay.SlotState, error) {
	err := u.ask(ctx)
	u.lock()
	defer u.unlock()
	s := u.pg.slot
	s.Active, s.Confirmed, s.Restart = u.pg.active != nil, u.pg.confirmed, u.pg.confirmed
	if s.Active {
		s.ActivePID = 4711
	}
	return s, err
}

func (u *postgresConn) Publication(ctx context.Context) (relay.PublicationIdentity, error) {
	err := u.ask(ctx)
	u.lock()
	defer u.unlock()
	return u.pg.identity, err
}

func (u *postgresConn) Start(ctx context.Context, from outbox.LSN, binary bool) error {
	if err := u.ask(ctx); err != nil {
		return err
	}
	u.lock()
	defer u.unlock()
	if u.pg.active != nil {
		return &outbox.Fault{Class: outbox.Transient, Code: relay.CodeSlotInUse, Message: "slot in use"}
	}
	u.pg.active, u.started, u.binary, u.from = u, true, binary, from
	u.pg.w.started = append(u.pg.w.started, start{time.Now(), from, binary})
	go u.stream(max(from, u.pg.confirmed))
	u.pg.w.step("started", uint64(from))
	return nil
}

// stream sends what is in the WAL: every transaction whose commit record starts at from or later.
func (u *postgresConn) stream(from outbox.LSN) {
	defer close(u.batches)
	var pending []relay.WALMessage
	next, described := 0, false
	rnd := rand.New(rand.NewPCG(uint64(from), 7))
	var own *noise // nobody else draws from it meanwhile
	if u.noise != nil {
		own = &noise{rnd}
	}
	for {
		u.lock()
		if u.pg.active != u { // the server has ended it; the process does not know yet
			u.unlock()
			<-u.gone
			return
		}
		for len(pending) < 8 && next < len(u.pg.wal) {
			x := u.pg.wal[next]
			next++
			if x.start < from {
				continue
			}
			messages := x.messages(!described, u.pg.payload, u.binary)
			described = described || len(x.rows) > 0
			if rnd.IntN(4) == 0 && !u.pg.quiet { // a keepalive inside reports the start of the commit record
				u.sent = max(u.sent, x.start)
				messages = slices.Insert(messages, len(messages)-1,
					relay.WALMessage{Keepalive: true, WALEnd: u.sent})
			}
			pending = append(pending, messages...)
		}
		if len(pending) == 0 && u.sent < u.pg.end && !u.pg.quiet {
			u.sent = u.pg.end
			pending = append(pending, relay.WALMessage{Keepalive: true, WALEnd: u.pg.end})
		}
		grown, delay := u.pg.grown, u.pg.delay
		if delay > 0 {
			delay = own.about(delay)
		}
		u.unlock()
		if len(pending) == 0 {
			select {
			case <-grown:
				// It comes a moment later.
				if !u.pause(time.Duration(rnd.IntN(800_000) + 1)) {
					return
				}
			case <-u.gone:
				return
			}
			continue
		}
		if !u.pause(delay) {
			return
		}
		n := min(1+rnd.IntN(12), len(pending))
		select {
		case u.batches <- batchOf(pending[:n]):
			if !u.pause(own.about(0)) { // whoever took it goes on at this very moment
				return
			}
			u.lock()
			u.taken++
			u.pg.w.step("batch", uint64(n))
			u.unlock()
		case <-u.gone:
			return
		}
		pending = pending[n:]
	}
}

func (u *postgresConn) pause(d time.Duration) bool {
	if d == 0 {
		return true
	}
	select {
	case <-time.After(d):
		return true
	case <-u.gone:
		return false
	}
}

// batchOf copies messages into a buffer that is overwritten when it is given back.
func batchOf(messages []relay.WALMessage) *relay.Batch {
	b := &relay.Batch{Messages: append([]relay.WALMessage(nil), messages...)}
	for i := range b.Messages {
		b.Messages[i].Data = append([]byte(nil), b.Messages[i].Data...)
	}
	released := false
	b.Free = func() {
		if released {
			panic("a batch is given back twice")
		}
		released = true
		for _, m := range b.Messages {
			for i := range m.Data {
				m.Data[i] = 0xFF
			}
		}
	}
	return b
}

func (u *postgresConn) Batches() <-chan *relay.Batch { return u.batches }

func (u *postgresConn) Err() error {
	u.lock()
	defer u.unlock()
	return u.err
}

// Confirm reports within 100 ms.
func (u *postgresConn) Confirm(lsn outbox.LSN) {
	u.lock()
	defer u.unlock()
	u.report = max(u.report, lsn)
	if u.timer || u.dead {
		return
	}
	u.timer = true
	time.AfterFunc(u.noise.about(100*time.Millisecond), func() {
		u.lock()
		defer u.unlock()
		u.timer = false
		if !u.dead && u.pg.active == u {
			u.pg.settle(u.report)
		}
	})
}

func (u *postgresConn) Stop(ctx context.Context) error {
	u.lock()
	defer u.unlock()
	if u.dead {
		return errDown
	}
	if u.pg.active == u {
		u.pg.settle(u.report)
	}
	if u.dead { // at this very moment
		return errDown
	}
	u.stopped = true
	u.pg.w.stops++
	u.end(true)
	return nil
}

func (u *postgresConn) Close() {
	u.lock()
	defer u.unlock()
	u.end(true)
}

// cut ends the connection. The server notices at once, or keeps the slot for a while.
func (u *postgresConn) cut(noticed bool) {
	if u.dead {
		return
	}
	u.err = errDown
	u.end(noticed)
}

func (u *postgresConn) end(noticed bool) {
	if u.dead {
		return
	}
	u.dead = true
	close(u.gone)
	if !u.started {
		close(u.batches)
	}
	free := func() {
		if u.pg.active == u {
			u.pg.active = nil
		}
	}
	if noticed {
		free()
		return
	}
	time.AfterFunc(time.Duration(u.pg.rnd.IntN(3000))*time.Millisecond, func() {
		u.lock()
		defer u.unlock()
		free()
	})
}

// writer writes logical messages as a process does.
type writer struct{ pr *process }

func (w *writer) Heartbeat(ctx context.Context) error {
	return w.write(ctx, logical{prefix: relay.HeartbeatPrefix}, func(pg *postgres) {
		pg.ticks = append(pg.ticks, time.Now())
	})
}

func (w *writer) Change(ctx context.Context, s relay.Settings) error {
	return w.write(ctx, logical{prefix: relay.SettingsPrefix, content: s.Content("outflow")},
		func(pg *postgres) { pg.changes = append(pg.changes, s) })
}

func (w *writer) Watermark(ctx context.Context, mark relay.Watermark) error {
	return w.write(ctx, logical{prefix: relay.WatermarkPrefix, content: mark.Content()},
		func(pg *postgres) { pg.watermarks = append(pg.watermarks, mark) })
}

func (w *writer) write(ctx context.Context, m logical, note func(*postgres)) error {
	pg := w.pr.pg
	pg.w.mu.Lock()
	d := w.pr.noise.about(pg.writeDelay)
	pg.w.mu.Unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return ctx.Err()
	}
	pg.w.mu.Lock()
	defer pg.w.mu.Unlock()
	if w.pr.dead || time.Now().Before(pg.down) {
		return errDown
	}
	if pg.writeFails > 0 {
		pg.writeFails--
		if pg.failsLate {
			pg.commit(nil, m)
		}
		return errDown
	}
	note(pg)
	pg.commit(nil, m)
	return nil
}
