"""A runnable model of clusters that share one stream for each home: what must hold so that any cluster may go on with it.

A home commits events, and control rows of its Outflow: ticks, changes of settings, watermarks. Its rows are replicated to the other
clusters in order, with delay, through links that may be cut; each has them in its WAL between its own rows. The stream of the home can be
reached by all. A process at each cluster reads its own WAL through its own slot, and makes the home's messages from it; position and time of
an input are those of the commit at its origin. Each message is stored only at the sequence that its sender predicts.

Who works is said by the record (epoch and owner); anybody may take the next epoch at any moment, also while the owner works, or sleeps in
the middle of anything. What counts is said by the stream. An owner away from the home sees no ticks when the home is dead, so it closes what
it holds by a *cut* at the newest input that it has. The cut is a message of the stream, at its predicted sequence; when it is durable, the
record gets it; when that is durable, what was closed follows. All messages name the newest cut that their sender knows, and are
refused if there is another one. The broker may lose what it had not synced, of the stream and of the record.

Consumers read what is stored, durable or not. They know by (due, n) what they have done: what the broker lost must come again as the same
messages. So after a loss nobody cuts below an input that the home has committed since: at or above it lies all that was ever closed, and so
all that can have been read. (In a program: a row of the home that names the broker's present life.)

The claim: the stream is at any time the beginning of what the rules make of the home's WAL and the cuts, so each event is there once, in
order; each consumer has done the beginning of that, each event once; and it is complete as far as somebody has the rows,
unless the home is gone for good and the broker lost something behind its last input.

Run: python3 shared_model.py [trials [first seed]]       random trials
     python3 shared_model.py mutations                   takes away one rule after the other: each must fail
"""
import random, sys
from collections import namedtuple

Input = namedtuple("Input", "lsn time events settings watermark")       # watermark: a confirmed LSN of the home, or None
Settings = namedtuple("Settings", "horizon max_events")
Event = namedtuple("Event", "pos key")
Message = namedtuple("Message", "event due thru n of cut")              # of an event, or of a cut: then only cut is set
Checkpoint = namedtuple("Checkpoint", "due seq settings")               # of the inputs up to due all is in the stream up to seq

MUTATIONS = {
    "stream": "the cut is in the record alone, by compare-and-set",
    "predict": "the cut is stored at whatever sequence comes next",
    "compare": "the record is written without being compared",
    "fence": "messages do not name the newest cut that their sender knows",
    "order": "messages are stored at whatever sequence comes next",
    "early": "the record has the cut before its message is durable",
    "durable": "what a cut has closed is sent before the record's cut is durable",
    "newest": "a start does not take over a cut that is the stream's newest message",
    "follow": "a home that returns leaves the cuts of others out",
    "rows": "whoever cannot make the stream's newest message goes on behind it all the same",
    "thru": "a cut may come before the input that closed the stream's newest message, if a checkpoint lies between",
    "life": "after a loss a cut may come below what the home has committed since",
    "mark": "a consumer goes on behind a cut that it has read",
    "close": "a cut is noted below inputs that were read",
    "time": "an input has the time at which it arrived",
    "position": "an input has the position that it has in the WAL that is read",
    "foreign": "rows of other origins are inputs",
    "ticks": "ticks are not replicated",
    "settings": "changes of settings are not replicated",
    "skip": "a subscription skips a transaction",
    "count": "the same, and a cluster stops as soon as it has the next watermark, because its count differs",
    "slot": "a slot is confirmed by what its own process has made",
    "age": "others than the owner judge by its age whether a checkpoint is durable",
    "confirm": "a slot is confirmed by the newest checkpoint, durable or not",
}
bent = None                                                             # the rule that is taken away


class Rules:
    """Inputs to messages. It sees no clock, and does not know where it runs."""
    def __init__(s, p): s.set = s.set_at_due = p.settings; s.due = p.due; s.inputs, s.events = [], []

    def add(s, x):
        if x.watermark is not None: return []
        s.inputs.append(x)
        if x.settings: s.set = x.settings
        s.events += [Event((x.lsn, i), k) for i, k in enumerate(x.events)]
        due = None
        for y in s.inputs:
            if y.lsn < x.lsn and x.time - y.time >= s.set.horizon: due = y.lsn
        left = [e for e in s.events if due is None or e.pos[0] > due]
        while len(left) > s.set.max_events:
            due = left[0].pos[0]
            left = [e for e in left if e.pos[0] > due]
        return s.close(due, x.lsn) if due is not None else []

    def close(s, due, thru):
        take = [e for e in s.events if e.pos[0] <= due]
        s.events = [e for e in s.events if e.pos[0] > due]
        if not s.events: due = thru
        for y in s.inputs:
            if y.lsn <= due and y.settings: s.set_at_due = y.settings
        s.inputs, s.due = [y for y in s.inputs if y.lsn > due], due
        return [Message(e, due, thru, n, len(take), None) for n, e in enumerate(sorted(take, key=lambda e: (e.key, e.pos)))]

    def cut(s, lsn): return [Message(None, 0, 0, 0, 0, lsn)] + s.close(lsn, lsn)


def undisturbed(wal, cuts, first):
    """What the rules make of a WAL and cuts."""
    r, out = Rules(Checkpoint(0, 0, first)), []
    for x in wal:
        out += r.add(x)
        if x.lsn in cuts: out += r.cut(x.lsn)
    return out


class Restart(Exception): pass                                          # a session ends, and starts again


class Record:
    """checkpoints: each with the time when it was stored. confirmed: what the owner has found durable."""
    def __init__(s, epoch, owner, checkpoints, cuts, confirmed):
        s.epoch, s.owner, s.checkpoints, s.cuts, s.confirmed = epoch, owner, checkpoints, cuts, confirmed


class Cluster:
    skipped = stopped = False                                           # "count" alone
    def __init__(s, c): s.c, s.wal, s.lsn, s.next, s.run, s.wakes, s.link, s.whole = c, [], 0, 0, None, 0, [], True     # next: what the slot still has

    def log(s, rnd, ours, x):
        s.lsn += rnd.randint(2, 9)
        s.wal.append((s.lsn, ours, x))

    def confirm(s, due):
        """The slot forgets all that comes before the first input above due."""
        while s.next < len(s.wal) and not (s.wal[s.next][1] and s.wal[s.next][2].lsn > due): s.next += 1


class Consumer:
    """Knows by its mark what it has done, and where it goes on: behind the last event, not behind a cut, which may be lost."""
    def __init__(s): s.done, s.mark, s.seq, s.at = [], (0, 0), 0, 0

    def read(s, m):
        s.seq += 1
        if m.cut and bent != "mark": return
        s.at = s.seq
        if m.cut or (m.due, m.n) <= s.mark: return
        s.done.append(m.event.pos)
        s.mark = (m.due, m.n)


class World:
    def __init__(s, seed):
        s.rnd = rnd = random.Random(seed)
        s.now, s.durable_after = 0, rnd.choice([0, 10, 40])
        s.first = Settings(rnd.choice([2, 10, 30]), rnd.choice([5, 20, 1000]))
        s.clusters = [Cluster(c) for c in range(rnd.choice([2, 3, 4]))]
        s.history, s.alive, s.calm = [], True, False                    # the home's WAL; is its database up?
        s.stream, s.synced = [], []                                     # messages, and when each is on disk
        s.records = [(Record(0, 0, {Checkpoint(0, 0, s.first): 0}, (), 0), 0)]  # revisions, each with when it is on disk
        s.revision, s.wires, s.losses, s.takes, s.cuts, s.refused = 0, [], 0, 0, 0, 0
        s.consumers, s.reads, s.lost_at = [Consumer(), Consumer()], random.Random(-1 - seed), 0     # lost_at: the home's WAL ended there at the last loss
        s.suspect, s.back = rnd.choice([.002, .02, .1]), rnd.choice([.003, .02, .2])    # how readily others take over, and the home returns

    # PostgreSQL
    def commit(s, events=(), settings=None, watermark=None):
        """A commit of the home. Times of neighbours may be swapped. Control rows of a dead home are not written."""
        if not s.alive or s.calm and watermark is None and events: return
        lsn = (s.history[-1].lsn if s.history else 0) + s.rnd.randint(2, 6)
        x = Input(lsn, s.now + s.rnd.uniform(-2, 0), tuple(events), settings, watermark)
        s.history.append(x)
        for c in s.clusters:
            if c.c == 0: c.log(s.rnd, True, x)
            else: c.link.append((s.now + s.rnd.choice([1, 3, 30]), x))

    def replicate(s):
        for c in s.clusters[1:]:
            if not s.calm and s.rnd.random() < .1: c.log(s.rnd, False, Input(c.lsn, s.now, ("9",), None, None))
            if not s.calm and s.rnd.random() < .01: c.whole = not c.whole
            while c.link and c.link[0][0] <= s.now and (c.whole or s.calm):
                x = c.link.pop(0)[1]
                if bent == "skip" and s.rnd.random() < .05: continue
                if bent == "count" and x.watermark is None and s.rnd.random() < .005: c.skipped = True; continue
                if c.skipped and x.watermark is not None: c.stopped = True; s.end(c)
                if bent == "ticks" and not x.events and not x.settings and x.watermark is None: continue
                if bent == "settings" and x.settings: continue
                if bent == "time": x = x._replace(time=s.now)
                c.log(s.rnd, True, x)

    # NATS
    def arrive(s, wire):
        m, expected, fence, acks = wire.pop(0)
        ok = expected == len(s.stream) or bent == ("predict" if m.cut else "order")
        ok = ok and (fence == s.newest_cut() or bent == "fence")
        if ok: s.stream.append(m); s.synced.append(s.now + s.durable_after)
        else: s.refused += 1
        if acks is not None: acks.append((expected + 1, ok))

    def newest_cut(s): return next((q for q in range(len(s.stream), 0, -1) if s.stream[q - 1].cut), 0)

    def save(s, known, rec):
        """Compare-and-set of the record; the new revision's number."""
        if s.revision != known and bent != "compare": raise Restart
        s.revision += 1
        s.records.append((rec, s.now + s.durable_after))
        return s.revision

    def lose(s):
        """The broker forgets what is not on disk, from any point on; all connections end. What was on its way may still arrive."""
        cut = s.rnd.randint(sum(t <= s.now for t in s.synced), len(s.stream))
        s.losses += len(s.stream) - cut
        s.lost_at = s.history[-1].lsn if s.history else 0
        for k in s.consumers:                                           # one that is there goes back, another one finds the stream longer than that again
            k.seq = k.at if s.reads.random() < .5 else s.reads.randint(0, min(k.at, cut))
        del s.stream[cut:], s.synced[cut:]
        oldest = max(i for i, (_, t) in enumerate(s.records) if t <= s.now)
        del s.records[s.rnd.randint(oldest, len(s.records) - 1) + 1:]
        for w in s.wires: w[:] = [x for x in w if not x[0].cut]         # a cut that was on its way does not arrive
        s.synced, s.records = [s.now] * cut, [(r, min(t, s.now)) for r, t in s.records]
        s.revision += 1                                                 # no revision that somebody knows is there again
        for c in s.clusters: s.end(c)

    def end(s, c):
        if c.run: c.run.close()
        c.run = None

    def check(s):
        want = undisturbed(s.history, {m.cut for m in s.stream if m.cut}, s.first)
        assert s.stream == want[:len(s.stream)], "the stream is not the beginning of what the rules make"
        there = [m.event.pos for m in s.stream if m.event]
        assert len(there) == len(set(there)), "an event is there twice"
        want = [m.event.pos for m in want if m.event]
        for k in s.consumers: assert k.done == want[:len(k.done)], "a consumer has not done the beginning of what the rules make"

    # the world goes on
    def step(s):
        rnd, home = s.rnd, s.clusters[0]
        s.now += 1
        if not s.calm:
            if rnd.random() < .3: s.commit(["%03d" % rnd.randint(0, 99) for _ in range(rnd.choice([1, 1, 2, 6]))])
            if rnd.random() < .01: s.commit(settings=Settings(rnd.choice([2, 10, 30]), rnd.choice([5, 20, 1000])))
            if rnd.random() < .004:                                     # the home dies with its database, or returns
                s.alive = not s.alive
                if not s.alive: s.end(home)
            if rnd.random() < .01: s.end(rnd.choice(s.clusters))
            if rnd.random() < .02: rnd.choice(s.clusters).wakes = s.now + rnd.choice([5, 50, 200])
            if rnd.random() < .01: s.lose()
        s.replicate()
        for w in s.wires:
            while w and rnd.random() < .4: s.arrive(w)
            if w and not s.calm and rnd.random() < .01: w.pop(rnd.randrange(len(w)))
        s.wires = [w for w in s.wires if w or w.open]
        for k in s.consumers:
            while k.seq < len(s.stream) and s.reads.random() < .7: k.read(s.stream[k.seq])
        for c in rnd.sample(s.clusters, len(s.clusters)):
            if c.wakes > s.now and not s.calm or c is home and not s.alive or c.stopped: continue
            if c is home and rnd.random() < .1: s.commit()              # its process ticks, whoever owns the stream
            for _ in range(rnd.choice([0, 1, 4])):
                if not c.run: c.run = process(s, c)
                try: next(c.run)
                except (StopIteration, Restart): s.end(c)


class Wire(list): open = True


def wait(w, n):
    until = w.now + n
    while w.now < until: yield


def process(w, c):
    """One life of the process at c: it stands by, or makes the stream."""
    rnd = w.rnd
    rec, revision = w.records[-1][0], w.revision
    if rec.owner != c.c:
        seen = 0
        for _ in range(rnd.randint(5, 60)):
            while seen < len(c.wal) and rnd.random() < .9:
                _, ours, x = c.wal[seen]; seen += 1
                if bent == "slot" and ours: c.confirm(x.lsn)
                elif ours and x.watermark is not None: c.confirm(x.watermark)
            if c.c == 0:
                done = rec.confirmed if bent != "age" else settled(w, rec.checkpoints)
                c.confirm(done)
                w.commit(watermark=done)
            if rnd.random() < (w.back if c.c == 0 else w.suspect):             # the home wants its stream back; others are suspicious, rightly or not
                w.takes += 1
                w.save(revision, Record(rec.epoch + 1, c.c, rec.checkpoints, rec.cuts, rec.confirmed))
                return
            yield
        return
    wire = Wire()
    w.wires.append(wire)
    try: yield from own(w, c, rec, revision, wire)
    finally:
        wire.open = False                                               # what was sent is on its way all the same
        wire[:] = [(*x[:3], None) for x in wire]


def settled(w, checkpoints):
    """The newest checkpoint that is durable. Only the owner knows: the broker may have lost a message that the record has a checkpoint behind."""
    return max([p.due for p, since in checkpoints.items() if since <= w.now - w.durable_after or bent == "confirm"], default=0)


def own(w, c, rec, revision, wire):
    rnd = w.rnd
    last = len(w.stream)
    fence = w.newest_cut()
    cuts = [x for x in rec.cuts if not (bent == "follow" and c.c == 0)]
    newest = w.stream[-1] if last else None
    if newest and newest.cut and newest.cut not in cuts and bent not in ("newest", "follow"):
        yield from wait(w, w.durable_after if bent != "early" else 0)   # somebody stored it, and died before the record had it
        cuts.append(newest.cut)
        rec = Record(rec.epoch, rec.owner, rec.checkpoints, tuple(cuts), rec.confirmed)
        revision = w.save(revision, rec)
    since = {p: t for p, t in rec.checkpoints.items() if p.seq <= last}
    if len(since) < len(rec.checkpoints):                               # the broker has lost its end, and the record had survived
        rec = Record(rec.epoch, rec.owner, dict(since), rec.cuts, rec.confirmed)
        revision = w.save(revision, rec)
    if bent != "durable": yield from wait(w, w.durable_after)           # the record is as it was read, also after a loss
    gone = max([x.lsn for _, ours, x in c.wal[:c.next] if ours and x.watermark is None], default=0)
    checkpoints = [p for p in since if p.due >= gone]
    assert checkpoints, "no checkpoint from which the slot goes on"
    p = rnd.choice(checkpoints)
    r, made, there, ready, acks, ends, read = Rules(p), 0, last - p.seq, [], [], [], None
    proved = there

    def hear():
        nonlocal proved
        while acks:
            seq, ok = acks.pop(0)
            if not ok: raise Restart
            proved = max(proved, seq - p.seq)
    def make(m):
        nonlocal made
        made += 1
        if made <= there: assert w.stream[p.seq + made - 1] == m or len(w.stream) < p.seq + made, "the stream has another message"
        else: ready.append((m, p.seq + made - 1))
    def send():
        while ready and len(wire) < 5: wire.append((*ready.pop(0), fence, acks))
    def settle():
        for _ in range(60):
            send(); hear()
            if proved >= made and not ready: return
            yield
        raise Restart                                                   # it never came
    def keep(lsn): ends.append((made, Checkpoint(r.due if r.events else lsn, p.seq + made, r.set_at_due if r.events else r.set)))

    i = c.next
    while True:
        while i < len(c.wal) and rnd.random() < .95:
            lsn, ours, x = c.wal[i]; i += 1
            if not ours and bent != "foreign" or x.lsn <= p.due: continue
            if bent == "position" and c.c: x = x._replace(lsn=lsn)
            for m in r.add(x): make(m)
            if x.watermark is None: read = x.lsn
            if x.lsn in cuts:
                for m in r.cut(x.lsn): make(m)
            if made >= there and x.watermark is None and (r.due > p.due or not r.events): keep(x.lsn)
        if made >= there: send()
        hear()
        if i == len(c.wal) and made < there:                            # its rows end before the stream does
            if bent == "rows": made = there
            elif rnd.random() < .05: return
        while ends and ends[0][0] <= proved:
            _, checkpoint = ends.pop(0)
            if checkpoint.due > max(q.due for q in since): since.setdefault(checkpoint, None)
        if rnd.random() < .2 and None in since.values():
            done = max(rec.confirmed, settled(w, rec.checkpoints))
            since = {q: w.now if t is None else t for q, t in since.items() if q.due >= done}
            rec = Record(rec.epoch, rec.owner, dict(since), tuple(x for x in cuts if x > min(q.due for q in since)), done)
            revision = w.save(revision, rec)
        if rnd.random() < .2:
            done = max(rec.confirmed, settled(w, rec.checkpoints))
            c.confirm(done)
            if c.c == 0: w.commit(watermark=done)
        low = max([p.due] + cuts)                                       # a cut comes behind the last one, and behind what made the newest message
        if bent != "life": low = max(low, w.lost_at)
        if w.stream and bent != "thru": low = max(low, w.stream[-1].thru - 1)
        if c.c and made >= there and i == len(c.wal) and r.events and read and read > low and rnd.random() < .3:
            yield from settle()                                         # all that it can make is there: it closes the rest
            at = read
            if bent == "close": at = rnd.choice([x.lsn for _, ours, x in c.wal if ours and low < x.lsn <= read])
            if bent != "stream":
                made += 1
                ready.append((Message(None, 0, 0, 0, 0, at), p.seq + made - 1))
                yield from settle()
                fence = p.seq + made
                if bent != "early": yield from wait(w, w.durable_after)
            w.cuts += 1
            cuts.append(at)
            rec = Record(rec.epoch, rec.owner, rec.checkpoints, tuple(cuts), rec.confirmed)
            revision = w.save(revision, rec)
            if bent != "durable": yield from wait(w, w.durable_after)
            for m in r.cut(at)[1 if bent != "stream" else 0:]: make(m)
            keep(at)
        yield


def trial(seed):
    w = World(seed)
    for _ in range(w.rnd.randint(100, 600)): w.step()
    w.alive = w.alive or w.rnd.random() < .7                            # or the home is gone for good
    w.calm, w.suspect, w.back = True, .001, .002
    for _ in range(60): w.step()                                        # the links bring what has left the home
    have = w.history if w.alive else max((([x for _, ours, x in c.wal if ours]) for c in w.clusters[1:]), key=len)
    w.check()
    due = {(x.lsn, i) for x in have for i in range(len(x.events))}
    newest = max((x.lsn for x in have if x.watermark is None), default=0)   # a cut lies at an input
    for _ in range(10_000):
        w.step()
        if len(w.stream) >= len(due) and due <= {m.event.pos for m in w.stream if m.event}: break
        if not w.alive and w.lost_at >= newest: break                   # nobody cuts any more
        if not w.alive and w.stream and w.stream[-1].thru > newest: break   # the home alone can go on
    else: raise AssertionError("events are missing: %d of %d" % (len(due - {m.event.pos for m in w.stream if m.event}), len(due)))
    w.check()
    return w


def trials(n, first=0):
    total = dict(events=0, take_overs=0, cuts=0, refused=0, lost=0, home_gone=0)
    for seed in range(first, first + n):
        try: w = trial(seed)
        except AssertionError as err: raise AssertionError("seed %d: %s" % (seed, err)) from err
        for k, v in dict(events=sum(1 for m in w.stream if m.event), take_overs=w.takes, cuts=sum(1 for m in w.stream if m.cut), refused=w.refused,
                         lost=w.losses, home_gone=not w.alive).items(): total[k] += v
    return total


def mutations(n=3000):
    global bent
    alive = []
    for bent, what in MUTATIONS.items():
        try: trials(n)
        except Exception as err: print("%-9s fails: %s: %s" % (bent, err or type(err).__name__, what), flush=True)
        else: alive.append(bent); print("%-9s SURVIVES %d trials: %s" % (bent, n, what), flush=True)
    if alive: sys.exit("these are not missed: " + ", ".join(alive))


def main():
    if sys.argv[1:] == ["mutations"]: return mutations()
    n, first = [int(a) for a in sys.argv[1:] + ["1000", "0"][max(0, len(sys.argv) - 1):]]
    print("%d trials from seed %d: every claim holds; %s" % (n, first, trials(n, first)))


if __name__ == "__main__": main()
