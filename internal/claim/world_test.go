package claim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// rules are those of docs/models/islands_model.py that a world can do without; some of the driver's duties
// are among them. bent is the one that is taken away.
var rules = map[string]string{
	"echo":      "a home that returns publishes at once",
	"token":     "an echo of an earlier hello counts",
	"leave":     "a home that returns publishes what was claimed as well",
	"watermark": "who claims claims also what a watermark covers",
	"claimed":   "who claims claims also what others have claimed",
	"rank":      "a slot belongs to everybody",
	"read":      "a claim may come before the own WAL is read to its end",
	"fresh":     "who returns counts silence from before its return",
	"behind":    "who reads a backlog counts silence as if it had just come",
	"range":     "a claim's range is greater than what is published for it",
	"order":     "rows are not replicated in their order",
	"away":      "a home that has yielded publishes again as soon as its NATS is back",
	"turn":      "everybody may claim as soon as a yield is read",
	"over":      "a hello does not end a yield",
	"unread":    "a home that returns does not read what its NATS has stored",
	"signs":     "an event is a sign of life of its home",
	"silent":    "a home that waits for echoes gives no signs of life",
	"late":      "a claim counts behind its writer's echo of a later hello",
	"slow":      "a claim may be committed at any later time",
	"forget":    "what was claimed and could not be published is forgotten",
	"soon":      "a home that starts again says no hello, however long it was away",
	"still":     "a home that starts again soon does not wait for the echoes that it waited for",
	"gone":      "a home that has yielded and starts again soon says no hello",
	"chain":     "a process that had to say hello and died before has ended the silence",
	"wait":      "a home that waits for an echo does not yield",
}

// harm is how much fails at a time.
type harm int

const (
	oneFails  harm = iota // one cluster, its outflow alone, or its NATS
	twoFail               // two of those
	wordGiven             // three of those, one maybe for good; an operator says of some that they are gone
	linksFail             // any number of those, and links as well
)

// event is a commit of a home: they are numbered from 1, which is their LSN.
type event struct {
	home int
	lsn  outbox.LSN
}

// entry is of a WAL: a cluster row, or the commit of an event.
type entry struct {
	from int
	lsn  outbox.LSN // of an event; else 0
	row  relay.ClusterRow
	time time.Duration // of its commit
}

type sent struct {
	at int
	entry
}

// process is what drives one Home or Reader. It dies with its cluster's outflow; what it has kept does not.
type process struct {
	state
	kept state
	busy *sent // the row that is being written
}

type state struct {
	home   Home
	reader Reader
	read   int          // of the WAL
	todo   []outbox.LSN // what is to be published: own commits, or claimed ones
}

func (s *state) clone() state {
	c := *s
	c.todo = slices.Clone(s.todo)
	return c
}

type cluster struct {
	id            int
	up, run, nats bool // its database; its outflow; its NATS can be reached
	away          bool // its outflow knows that it can't
	wal           []entry
	links         map[int][]sent // by where they go: rows on their way
	strays        []sent         // rows whose writer has died
	written       outbox.LSN
	number        uint64         // of the newest hello
	stored        map[event]bool // in its NATS
	left          map[event]bool // to others, by its record
	procs         []*process     // by home; 0 unused
	came          map[event]int  // when its reader read a commit
	begun         int            // its newest fault
	covered       []outbox.LSN   // by home: the newest Published in its WAL
	kind          string         // of its fault; "": none
	until         int            // its end
	whole         int            // the end of its newest fault
	gone          bool           // an operator has said so
}

type world struct {
	bent    string
	rnd     *rand.Rand
	harm    harm
	calm    bool
	now     int
	n       int
	lag     int
	beat    int
	delay   int
	cs      []*cluster
	by      map[event][]int // who has published it
	born    map[event]int   // when it was committed
	unsure  map[event]bool  // whoever has published it could not say so
	claimer map[event]int   // the cluster that has claimed it last
	broken  map[[2]int]bool
	faults  int
	claims  int
	yields  int
	words   int            // of operators
	never   *cluster       // that does not return
	taken   map[event]bool // what it has claimed
	soon    int            // starts without a hello
	problem error
}

func (w *world) chance(p float64) bool { return w.rnd.Float64() < p }

func (w *world) time() time.Duration { return time.Duration(w.now) * time.Millisecond }

func newWorld(seed uint64, harm harm, bent string) *world {
	rnd := rand.New(rand.NewPCG(seed, 1))
	w := &world{bent: bent, rnd: rnd, harm: harm, n: 2 + rnd.IntN(3), lag: []int{2, 10, 20}[rnd.IntN(3)],
		beat: []int{1, 5, 15}[rnd.IntN(3)], by: map[event][]int{}, born: map[event]int{},
		unsure: map[event]bool{}, claimer: map[event]int{},
		broken: map[[2]int]bool{}, cs: make([]*cluster, 1)}
	w.delay = 4*(w.lag+w.beat) + 20
	for id := 1; id <= w.n; id++ {
		c := &cluster{id: id, up: true, run: true, nats: true, links: map[int][]sent{},
			stored: map[event]bool{}, left: map[event]bool{}, came: map[event]int{},
			covered: make([]outbox.LSN, w.n+1),
			procs:   make([]*process, w.n+1)}
		cfg := Config{Self: id, Count: w.n, Delay: time.Duration(w.delay) * time.Millisecond,
			Beat: time.Duration(w.beat) * time.Millisecond}
		for h := 1; h <= w.n; h++ {
			p := &process{state: state{home: NewHome(cfg), reader: NewReader(cfg, h)}}
			p.kept = p.clone()
			c.procs[h] = p
		}
		w.cs = append(w.cs, c)
		w.start(c)
	}
	return w
}

// start starts a cluster's outflow, from what its processes have kept.
func (w *world) start(c *cluster) {
	c.run, c.away = true, true // it has to read what its NATS has
	for h := 1; h <= w.n; h++ {
		p := c.procs[h]
		cfg := p.home.cfg
		p.state, p.busy = p.kept.clone(), nil
		since := p.reader.since
		if h == c.id {
			published := p.home.published
			p.home = HomeFrom(cfg, p.home.State())
			p.home.Published(published)
			p.home.Start(outbox.LSN(len(c.wal)))
			p.home.waits = p.home.waits && w.bent != "still"
			if w.bent == "gone" {
				p.home.yielded, p.home.told = false, false
			}
		} else if p.reader.Start(w.time()); w.bent == "fresh" {
			p.reader.since = since
		} else if w.bent == "behind" {
			p.reader.since = w.time()
		}
	}
}

// commit puts an entry into a WAL, and on its way to the others.
func (w *world) commit(c *cluster, e entry) {
	e.time = w.time()
	if r := &e.row; r.Kind == relay.Claim {
		for lsn := r.From + 1; lsn <= r.To; lsn++ {
			w.claimer[event{r.Home, lsn}] = c.id
		}
	}
	w.arrive(c, e)
	for id := 1; id <= w.n; id++ {
		if id != c.id {
			c.links[id] = append(c.links[id], sent{w.now + 1 + w.rnd.IntN(w.lag), e})
		}
	}
}

func (w *world) arrive(c *cluster, e entry) {
	c.wal = append(c.wal, e)
	if e.row.Kind == relay.Published {
		c.covered[e.from] = max(c.covered[e.from], e.row.To)
	}
}

func (w *world) publish(c *cluster, e event) {
	w.by[e] = append(w.by[e], c.id)
	c.stored[e] = true
}

// fail breaks something of a cluster.
func (w *world) fail(c *cluster, kind string) {
	c.kind, c.until, c.begun = kind, w.now+[]int{5, 50, 200, 500}[w.rnd.IntN(4)], w.now
	w.faults++
	if c.run && c.nats { // some was stored, and the acknowledgement does not come
		for h := 1; h <= w.n; h++ {
			p := c.procs[h]
			for _, lsn := range p.todo[:min(len(p.todo), []int{0, 0, 1, 3}[w.rnd.IntN(4)])] {
				e := event{h, lsn}
				if !c.stored[e] && (h != c.id || p.home.May(lsn, lsn) == Publish) {
					w.publish(c, e)
				}
			}
		}
	}
	heard := c.covered[c.id]
	if w.harm == wordGiven && kind == "down" && w.never == nil && w.chance(.1) {
		w.lose(c)
	}
	switch kind {
	case "nats":
		c.nats = false
	case "relay", "down":
		c.run = false
		for _, p := range c.procs[1:] {
			if p.busy != nil && kind == "relay" {
				c.strays = append(c.strays, *p.busy)
			}
		}
		if kind == "relay" {
			break
		}
		c.up, c.strays = false, nil
		for _, d := range w.cs[1:] {
			heard = min(heard, d.covered[c.id])
			for i := range c.links[d.id] { // what was on its way stays there
				c.links[d.id][i].at = 1 << 30
				w.unheard(&c.links[d.id][i].row)
			}
		}
	}
	for lsn := heard + 1; lsn <= c.written; lsn++ {
		if e := (event{c.id, lsn}); c.stored[e] {
			w.unsure[e] = true
		}
	}
}

// unheard takes note of a claim that has not left: others may claim the same.
func (w *world) unheard(r *relay.ClusterRow) {
	if r.Kind == relay.Claim {
		for lsn := r.From + 1; lsn <= r.To; lsn++ {
			w.unsure[event{r.Home, lsn}] = true
		}
	}
}

// lose is the end of a cluster, which is down from now on.
func (w *world) lose(c *cluster) {
	w.never, w.taken, c.until = c, map[event]bool{}, 1<<30
	c.gone = false // whoever was not told before is told now
	for _, e := range c.wal {
		if r := &e.row; r.Kind == relay.Claim && r.By == c.id {
			for lsn := r.From + 1; lsn <= r.To; lsn++ {
				w.taken[event{r.Home, lsn}] = true
			}
		}
	}
}

func (w *world) mend(c *cluster) {
	for _, d := range w.cs[1:] {
		r := &d.procs[c.id].reader
		for lsn := outbox.LSN(1); lsn <= r.newest && r.hello > 0 && w.harm == oneFails && d != c; lsn++ {
			e := event{c.id, lsn}
			if len(w.by[e]) == 0 && w.now-max(d.came[e], c.begun) >= (w.n+2)*w.delay {
				w.problem = fmt.Errorf("nobody publishes %v while %s", e, c.kind)
			}
		}
	}
	switch c.kind {
	case "nats":
		c.nats = true
	case "relay":
		w.start(c)
	case "down":
		c.up = true
		for _, d := range w.cs[1:] {
			for i := range c.links[d.id] {
				c.links[d.id][i].at = w.now + 1 + w.rnd.IntN(w.lag)
			}
			for i := range d.links[c.id] { // as for those who have to connect again
				d.links[c.id][i].at = max(d.links[c.id][i].at, w.now+1+w.rnd.IntN(w.lag))
			}
		}
		w.start(c)
	}
	c.kind, c.whole = "", w.now
}

// idle looks for an event of a home that lives that nobody has published, though another cluster lives too:
// whatever a third one does, it is published after two circles of slots and four, but for what that one had
// claimed before it failed.
func (w *world) idle() {
	for _, c := range w.cs[1:] {
		whole := -1
		for _, d := range w.cs[1:] {
			if d != c && d.kind == "" && (whole < 0 || d.whole < whole) {
				whole = d.whole
			}
		}
		if c.kind != "" || whole < 0 {
			continue
		}
		for _, lsn := range c.procs[c.id].todo {
			e := event{c.id, lsn}
			if len(w.by[e]) > 0 || w.taken[e] {
				continue
			}
			since := max(w.born[e], c.whole, whole)
			if d := w.cs[w.claimer[e]]; d != nil {
				if d.kind != "" {
					continue
				}
				since = max(since, d.whole)
			}
			if w.now-since >= (2*w.n+4)*w.delay {
				w.problem = fmt.Errorf("%v is not published %d steps later by a home that lives", e,
					w.now-since)
			}
			break
		}
	}
}

func (w *world) step() {
	w.now++
	broken := 0
	for _, c := range w.cs[1:] {
		if c.kind != "" && (w.calm || w.now >= c.until) && c != w.never {
			w.mend(c)
		}
		onTheirWay := w.harm == oneFails && c.whole > 0 && w.now-c.whole <= w.lag // are rows still
		if c.kind != "" || onTheirWay {
			broken++
		}
	}
	if w.harm != linksFail {
		w.idle()
	}
	if w.calm {
		clear(w.broken)
	} else {
		often := .004
		if w.harm == wordGiven {
			often = .015
		}
		if w.chance(often) && (w.harm == linksFail || broken <= int(w.harm)) {
			if c := w.cs[1+w.rnd.IntN(w.n)]; c.kind == "" {
				w.fail(c, []string{"down", "relay", "nats"}[w.rnd.IntN(3)])
			}
		}
		if l := [2]int{1 + w.rnd.IntN(w.n), 1 + w.rnd.IntN(w.n)}; w.harm == linksFail && w.chance(.01) {
			w.broken[l] = !w.broken[l]
		}
	}
	if w.harm == wordGiven {
		w.operate()
	}
	for _, c := range w.cs[1:] {
		if c.up {
			w.database(c)
		}
		if c.run {
			w.outflow(c)
		}
	}
}

// operate names a cluster that is down as gone, and takes that back, mostly before it returns: at each home
// alone, whose outflow is started again for it. Some of them are told later, or never.
func (w *world) operate() {
	for _, d := range w.cs[1:] {
		returns := d.gone && (d.kind != "down" && w.chance(.02) || d.kind == "down" && w.now == d.until-1)
		if !returns && !(d.kind == "down" && !d.gone && w.chance(.02)) && !(w.chance(.0002) && !w.calm) {
			continue
		}
		d.gone = !d.gone
		w.words++
		for _, c := range w.cs[1:] {
			if c == d || d != w.never && w.chance(.1) {
				continue
			}
			cfg := &c.procs[c.id].home.cfg
			cfg.Gone = slices.DeleteFunc(slices.Clone(cfg.Gone), func(n int) bool { return n == d.id })
			if d.gone {
				cfg.Gone = append(cfg.Gone, d.id)
			}
			if c.run {
				for _, p := range c.procs[1:] {
					if p.busy != nil {
						c.strays = append(c.strays, *p.busy)
					}
				}
				w.start(c)
				c.whole = w.now
			}
		}
	}
}

// database takes writes, and brings what others have written.
func (w *world) database(c *cluster) {
	if !w.calm && w.chance(.1) {
		c.written++
		w.born[event{c.id, c.written}] = w.now
		w.commit(c, entry{from: c.id, lsn: c.written})
	}
	due := func(s *sent) bool {
		if s.at > w.now {
			return false
		}
		w.commit(c, s.entry)
		return true
	}
	c.strays = slices.DeleteFunc(c.strays, func(s sent) bool { return due(&s) })
	for _, p := range c.procs[1:] {
		if c.run && p.busy != nil && (p.busy.at <= w.now) {
			if w.calm || !w.chance(.03) { // else it is refused
				w.commit(c, p.busy.entry)
			}
			p.busy = nil
		}
	}
	for _, d := range w.cs[1:] {
		q := d.links[c.id]
		if !d.up || w.broken[[2]int{d.id, c.id}] {
			continue
		}
		if w.bent == "order" && len(q) > 1 && w.chance(.1) {
			q[0], q[1] = q[1], q[0]
		}
		for ; len(q) > 0 && q[0].at <= w.now; q = q[1:] {
			w.arrive(c, q[0].entry)
		}
		d.links[c.id] = q
	}
}

// outflow drives the processes of a cluster.
func (w *world) outflow(c *cluster) {
	for h := 1; h <= w.n; h++ {
		p := c.procs[h]
		for p.read < len(c.wal) && (w.calm || w.chance(.9)) {
			w.take(c, h, p, c.wal[p.read])
			p.read++
		}
		if end := p.read == len(c.wal) || w.bent == "read"; end && c.nats && h != c.id {
			p.reader.End(w.time())
		}
		if c.nats {
			w.work(c, h, p)
		}
		if p.busy == nil {
			w.say(c, h, p)
		}
		if w.chance(.02) {
			p.kept = p.clone()
		}
	}
	c.away = !c.nats
}

// take reads an entry of the WAL.
func (w *world) take(c *cluster, h int, p *process, e entry) {
	own, row, r := h == c.id, e.row, &p.reader
	if e.lsn != 0 {
		if own && e.from == h {
			p.todo = append(p.todo, e.lsn)
		} else if !own && e.from == h {
			r.Commit(w.time(), e.lsn)
			c.came[event{h, e.lsn}] = w.now
			if w.bent == "signs" && !r.yielded {
				r.since = w.time()
			}
		}
		return
	}
	if row.Kind == relay.Claim && w.bent == "late" {
		row.Hello = 1 << 62
	}
	if own {
		if w.bent == "token" && row.Kind == relay.Echo && row.Home == h {
			row.Hello = p.home.hello
		}
		w.home(c, p, &row, e.time)
		return
	}
	yielded, since, end, ended := r.yielded, r.since, r.end, r.ended
	switch {
	case w.bent == "claimed" && row.Kind == relay.Claim && row.Home == h && row.By != c.id:
		r.since = w.time()
		return
	case w.bent == "watermark" && row.Kind == relay.Published:
		row.To = 0
	}
	if w.bent == "behind" {
		r.end, r.ended = true, w.time()
	}
	publish := r.Row(w.time(), &row)
	r.end, r.ended = end, ended
	if w.bent == "over" && row.Kind == relay.Hello && row.By == h {
		r.yielded, r.since = yielded, since
	}
	if w.bent == "range" && publish != (Range{}) {
		publish.To = max(min(publish.To, row.To-2), publish.From)
	}
	if w.bent == "forget" && w.chance(.1) {
		return
	}
	for lsn := publish.From + 1; lsn <= publish.To; lsn++ {
		p.todo = append(p.todo, lsn)
	}
}

// home reads a row of the WAL, the process' next one, as a home does.
func (w *world) home(c *cluster, p *process, row *relay.ClusterRow, at time.Duration) {
	h, lsn := &p.home, outbox.LSN(p.read+1)
	own, back := row.By == c.id && row.Home == 0, h.back
	if w.bent == "soon" && own {
		h.signed, h.gap = at, false
	}
	h.Row(row, lsn, at)
	switch {
	case w.bent == "echo":
		h.waits = false
	case w.bent == "chain" && own && lsn <= h.end:
		h.gap = false
	case w.bent == "gone" && own && lsn <= h.end:
		h.yielded, h.told = false, false
	}
	if h.back && !back && h.greeted {
		w.soon++
	}
}

// work publishes.
func (w *world) work(c *cluster, h int, p *process) {
	if h == c.id && c.away {
		if p.home.yielded && w.bent == "away" {
			p.home.away, p.home.yielded = false, false
		} else {
			p.home.Back()
			p.home.waits = p.home.waits && w.bent != "echo"
		}
	}
	pace := .9
	if w.harm == wordGiven && h != c.id {
		pace = .3
	}
	for len(p.todo) > 0 && w.chance(pace) {
		lsn := p.todo[0]
		e := event{h, lsn}
		known := c.stored[e] && (w.bent != "unread" || h != c.id) || c.left[e]
		if !known && h == c.id {
			switch verdict := p.home.May(lsn, lsn); {
			case verdict == Wait:
				return
			case verdict == Publish, w.bent == "leave":
				w.publish(c, e)
			default:
				c.left[e] = true
			}
		} else if !known {
			w.publish(c, e)
		}
		p.todo = p.todo[1:]
		if h == c.id {
			p.home.Published(lsn)
		}
	}
}

// say writes what a process has to say.
func (w *world) say(c *cluster, h int, p *process) {
	var row relay.ClusterRow
	if h == c.id {
		if !c.nats {
			p.home.Away(w.time())
		}
		if p.home.Nameless() && c.nats { // its record has it
			c.number++
			p.home.Number(c.number)
		}
		if w.bent == "wait" {
			p.home.asks = false
		}
		row = p.home.Next(w.time())
		if w.bent == "silent" && row.Kind == relay.Published && p.home.waits && p.home.back {
			return
		}
	} else {
		row = w.next(c, h, p)
	}
	late := 1 + w.rnd.IntN(w.delay/4-1)
	switch row.Kind {
	case 0:
		return
	case relay.Published:
		late = 1
	case relay.Claim:
		w.claims++
		if w.bent == "range" {
			row.To += 2
		}
		if w.bent == "slow" && w.chance(.1) {
			c.strays = append(c.strays, sent{w.now + 2*w.delay, entry{from: c.id, row: row}})
			return
		}
	case relay.Yield:
		w.yields++
	}
	p.busy = &sent{w.now + late, entry{from: c.id, row: row}}
	if w.chance(.1) { // the connection fails: nobody knows what becomes of it
		c.strays, p.busy = append(c.strays, *p.busy), nil
	}
}

func (w *world) next(c *cluster, h int, p *process) relay.ClusterRow {
	r := &p.reader
	if !(w.bent == "rank" || w.bent == "turn" && r.yielded) || r.echoes[c.id] < r.hello {
		return r.Next(w.time())
	}
	// as one of two clusters it is behind the home always
	q := *r
	q.cfg.Self, q.cfg.Count = h+1, 2
	q.echoes[h+1] = r.hello
	row := q.Next(w.time())
	if row.Kind != 0 {
		row.By = c.id
		r.asked = asked{row, w.time()}
	}
	return row
}

func (w *world) written() (n int) {
	for _, c := range w.cs[1:] {
		n += int(c.written)
	}
	return n
}

// tally is what happened in a world, or several.
type tally struct{ events, claims, yields, words, soon, faults, twice, copies, lost int }

func (t *tally) add(o tally) {
	t.events += o.events
	t.claims += o.claims
	t.yields += o.yields
	t.words += o.words
	t.soon += o.soon
	t.faults += o.faults
	t.twice += o.twice
	t.copies += o.copies
	t.lost += o.lost
}

// run is a whole trial: the world for some steps, and then until everything is mended and at rest.
func run(seed uint64, harm harm, bent string, steps int) (t tally, err error) {
	w := newWorld(seed, harm, bent)
	for range steps {
		w.step()
	}
	w.calm = true
	for i := 0; i < 10*w.delay && (i < 4*w.delay || len(w.by) < w.written()); i++ {
		w.step()
	}
	t = tally{claims: w.claims, yields: w.yields, words: w.words, soon: w.soon, faults: w.faults}
	if w.problem != nil {
		return t, w.problem
	}
	for _, c := range w.cs[1:] {
		for lsn := outbox.LSN(1); lsn <= c.written && c != w.never; lsn++ {
			e := event{c.id, lsn}
			who := w.by[e]
			t.events++
			if len(who) > 1 {
				t.twice++
				t.copies += len(who) - 1
			}
			slices.Sort(who)
			switch {
			case len(who) == 0 && w.taken[e]:
				t.lost++
			case len(who) == 0:
				return t, fmt.Errorf("lost: %v", e)
			case len(slices.Compact(who)) != len(who):
				return t, fmt.Errorf("twice by the same cluster: %v", e)
			case harm != oneFails || len(who) == 1:
			case len(who) > 2:
				return t, fmt.Errorf("two successors: %v by %v", e, who)
			case !w.unsure[e]:
				return t, fmt.Errorf("twice without a reason: %v by %v", e, who)
			}
		}
	}
	return t, nil
}
