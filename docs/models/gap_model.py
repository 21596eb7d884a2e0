"""A runnable model of gap mode (decision 0030): the rule, and a world in which it has to survive.

Counters are dense in each sequence (document, actor). An event whose predecessor was released is released at once, with the held ones
that follow it; one whose predecessor is missing is held until that is committed, or the bound has passed by commit timestamps, or too
much is held. Behind a held event the later ones of its group wait: those of its sequence, or, with scope document, of its document.

The WAL is a list of inputs: commits with events, heartbeats, changes of settings. Among them are cuts, on which another cluster has decided
(decision 0054): one comes behind the inputs up to its LSN, which may be that of the newest of them, and gives up all gaps. A session starts
from the checkpoint record and the stream alone, and sends message by message. It may be killed at any step; what it had sent may arrive
later, between its successor's messages; messages may be dropped on the way; the broker may lose what it had not synced, with or without
going back in its sequence, and the record on its own; retention removes old messages, but none that still have to be remembered.

The claims, checked in each trial:
 1. However often it dies, the stream equals the undisturbed one, message by message. A checkpoint to go on from is always left.
 2. Each event is in the stream once, and nothing is held at the end.
 3. The counters of a remembered sequence ascend, but for messages that are marked late. If none of its events was given up, cold or
    late, they ascend without a gap.
 4. Without overflow, an event of a sequence that was known from its first counter on is late only if it repeats a counter, or if some
    event of its group had been waiting for the whole bound, or up to a cut.
 5. Nothing waits without a reason: an event is released by its own transaction unless a counter is missing in its group.
 6. With scope document, an event that has a counter and is not late passes earlier events of its document only to fill in before the
    oldest of them: that one is of its own sequence and has a higher counter. (A transaction above the limits is sorted within itself.)
 7. Nothing is held behind a cut.

Run: python3 gap_model.py [trials [first seed]]     random trials
     python3 gap_model.py mutations                 takes away or bends one rule after the other: each must fail
     python3 gap_model.py order                     reads WALs from standard input, one JSON object a line, and prints the order
"""
import bisect, json, random, sys
from collections import namedtuple

MAX_HOLDS = 5                                               # in a checkpoint; 512 in the product

Settings = namedtuple("Settings", "mode bound cold memory first scope max_events max_bytes")
# events: (doc, actor, counter or None, span, size); settings: new ones, or None; cut: it is one, and nothing else
Input = namedtuple("Input", "lsn time events settings cut", defaults=[False])
Event = namedtuple("Event", "pos q c l size time")          # q: its sequence (doc, actor); c to l: its counters, None without
Message = namedtuple("Message", "pos q c l late at n of mode")
# Of the inputs up to `at` all is in the stream up to sequence `seq`, but for the events of `holds`: for each sequence with held events
# (position of its oldest held event, sequence, base). The base is None where the sequence is cold.
Checkpoint = namedtuple("Checkpoint", "at seq holds remembered settings")

MUTATIONS = {
    "span": "an event takes one counter, whatever its span",
    "follow": "what follows a released event stays held",
    "overtaken": "held events whose counters were passed stay held",
    "first": "the first counter of a sequence is like any other",
    "scope": "with scope document other sequences do not wait",
    "patience": "a cold sequence anywhere in a group ends the group's wait, not only at its head",
    "forget": "a sequence is remembered for ever",
    "null": "messages without a counter do not count against the memory",
    "late": "a late message is taken for the newest of its sequence",
    "remembered": "a start reads back as many messages as the settings say, also those from before gap mode",
    "run": "a sequence may be forgotten between its events in a large transaction",
    "spill": "whether a transaction is large depends on the process",
    "base": "a checkpoint does not say the bases of its holds",
    "oldest": "a checkpoint does not say where its holds begin",
    "cut": "a checkpoint with too many holds lists the first of them",
    "start": "replication begins at what was read, not before the oldest held event",
    "confirm": "what is confirmed is what was read, not what is before the oldest held event",
    "durable": "the record keeps the newest checkpoint at or below the confirmed LSN, durable or not",
    "retention": "retention may take what is still to be remembered",
    "open": "gaps stay open at a cut",
    "again": "a start from a checkpoint at the LSN of a cut takes the cut for done",
}
bent = None                                                 # the rule that is taken away


def known(p, x): return x.lsn <= p.at and not (x.cut and x.lsn == p.at and bent != "again")     # a checkpoint may be from before the cut at its LSN
def start(p): return min([p.at + 1] + [oldest[0] for oldest, _, _ in p.holds]) - 1      # where replication may begin


class Gap:
    """The state machine. It sees inputs, never a clock."""
    def __init__(s, settings, odd=False):
        s.set = settings
        s.odd = odd                                         # something that differs between processes, for a mutation
        s.made = 0                                          # messages, counted from anywhere
        s.remembered = 0                                    # so many of the newest count
        s.last = {}                                         # sequence -> (last counter, number) of its newest message that was not late
        s.held = {}                                         # group -> events, by position
        s.base = {}                                         # sequence with held events -> the greatest counter released; None: cold
        s.run = None, None                                  # in a large transaction: the sequence of the last event, and its base
        s.given = set()                                     # sequences that were given up or cold, for the claims

    def group(s, q): return q[0] if s.set.scope == "document" and bent != "scope" else q
    def known(s, q):
        c, n = s.last.get(q, (None, 0))
        if c is not None and (n >= s.made - s.remembered or bent == "forget"): return c
        return s.run[1] if s.run[0] == q and bent != "run" else None

    def release(s, e, late=False):
        s.out.append((e, late))
        if s.set.mode == "horizon": return
        if e.c is not None and (not late or bent == "late"): s.last[e.q] = (e.l, s.made)
        if e.c is None and bent == "null": return
        s.made += 1
        s.remembered = min(s.remembered + 1, s.set.memory)

    def take(s, e):
        if e.c is None or s.set.mode == "horizon": return s.release(e)
        b = s.base[e.q] if e.q in s.base else s.known(e.q)
        if b is None and e.c <= s.set.first and bent != "first": b = e.c - 1    # nothing precedes the first
        if s.run[0] == e.q: s.run = e.q, b
        if b is not None and e.l <= b: return s.release(e, late=True)
        s.base[e.q] = b
        if b is None: s.given.add(e.q)
        g = s.group(e.q)
        bisect.insort(s.held.setdefault(g, []), e)
        s.go_on(g)

    def go_on(s, g):
        """Releases what now follows, as long as it is the turn of the sequence of the group's oldest event."""
        h = s.held[g]
        while h:
            q = h[0].q
            own = sorted((e for e in h if e.q == q), key=lambda e: (e.c, e.pos))
            low, b = own[0], s.base[q]
            if b is None or low.c > b + 1: return
            h.remove(low)
            s.release(low)
            b = s.base[q] = low.l
            if s.run[0] == q: s.run = q, b
            own = [e for e in own[1:] if e.l <= b and bent != "overtaken"]      # a counter that came twice
            for e in own:
                h.remove(e)
                s.release(e, late=True)
            if not any(e.q == q for e in h): del s.base[q]
            if bent == "follow" and h: return
        del s.held[g]

    def give_up(s, g):
        """What is missing before the lowest held one of the oldest event's sequence is waited for no longer."""
        q = s.held[g][0].q
        s.base[q] = min(e.c for e in s.held[g] if e.q == q) - 1
        s.given.add(q)
        s.go_on(g)

    def oldest(s, of): return min(of, key=lambda g: s.held[g][0].pos)
    def expired(s, now):
        """The groups that have waited long enough: for the head's bound, or, as long as the head is cold, for the cold one's."""
        def limit(h, e): return s.set.cold if s.base[(e if bent == "patience" else h[0]).q] is None else s.set.bound
        return [g for g, h in s.held.items() if any(now - e.time >= limit(h, e) for e in h)]
    def fit(s):
        while sum(map(len, s.held.values())) > s.set.max_events or sum(e.size for h in s.held.values() for e in h) > s.set.max_bytes:
            s.give_up(s.oldest(s.held))

    def end(s):
        while s.held: s.give_up(s.oldest(s.held))

    def change(s, new):
        old = s.set
        if (new.mode, new.first, new.scope) != (old.mode, old.first, old.scope): s.end()
        s.set = new
        s.remembered = 0 if new.mode == "horizon" else min(s.remembered, new.memory)

    def add(s, x):
        """The messages that this input releases: its own window."""
        s.out, mode = [], s.set.mode
        if x.settings: s.change(x.settings)
        if x.cut and bent != "open": s.end()
        events = events_of(x)
        large = is_large(events, s.set) or bent == "spill" and s.odd
        if large and s.set.mode == "gap":                   # sorted within itself, and never held whole
            events.sort(key=lambda e: (e.q, e.c is not None, e.c or 0, e.pos))
        for e in events:
            if large and s.run[0] != e.q: s.run = e.q, None # not forgotten between its own events, so that a hold says all
            s.take(e)
            s.fit()                                         # never is more held, also within a transaction
        s.run = None, None
        while over := s.expired(x.time): s.give_up(s.oldest(over))
        s.fit()
        if not x.settings: mode = s.set.mode
        return [message(e, late, x.lsn, n, len(s.out), mode) for n, (e, late) in enumerate(s.out)]

    def checkpoint(s, at, seq):
        holds = tuple(sorted((min(e.pos for h in s.held.values() for e in h if e.q == q), q, b) for q, b in s.base.items()))
        if bent == "cut": holds = holds[:MAX_HOLDS]
        return Checkpoint(at, seq, holds, s.remembered, s.set) if len(holds) <= MAX_HOLDS else None
    def restore(s, p, newest):
        """newest: the messages up to the checkpoint's, newest first."""
        s.remembered = s.set.memory if bent == "remembered" else p.remembered
        for n, m in enumerate(newest[:s.remembered]):
            if m.c is not None and (not m.late or bent == "late"): s.last.setdefault(m.q, (m.l, -1 - n))
        for _, q, b in p.holds: s.base[q] = s.known(q) if bent == "base" else b
    def hold_again(s, p, x):
        """Reads an input at or below the checkpoint: only what it holds is taken, and nothing is released."""
        oldest = {q: pos for pos, q, _ in p.holds}
        for e in events_of(x):
            if e.q in oldest and e.c is not None and (e.pos >= oldest[e.q] or bent == "oldest") and (s.base.get(e.q) is None or e.l > s.base[e.q]):
                bisect.insort(s.held.setdefault(s.group(e.q), []), e)


def events_of(x):
    return [Event((x.lsn, i), (d, a), c, None if c is None else c if bent == "span" else c + span - 1, size, x.time)
            for i, (d, a, c, span, size) in enumerate(x.events)]


def is_large(events, settings): return len(events) > settings.max_events or sum(e.size for e in events) > settings.max_bytes


def message(e, late, at, n, of, mode):
    return Message(e.pos, e.q, e.c, e.l, late, at, n, of, mode) if mode == "gap" else Message(e.pos, e.q, None, None, False, at, n, of, mode)


class Killed(Exception): pass                               # the process died
class Restart(Exception): pass                              # it drops the session and starts again


class Record:
    """One revision. checkpoints: checkpoint -> when it was first stored; holes: sequences whose messages were lost and come again later."""
    def __init__(s, synced, checkpoints, holes): s.synced, s.checkpoints, s.holes = synced, checkpoints, holes


class World:
    """What outlives a session: PostgreSQL, the stream, the record, and the network between."""
    def __init__(s, wal, settings, rnd, durable_after):
        s.wal, s.rnd, s.durable_after, s.now = wal, rnd, durable_after, 0
        s.msgs, s.synced = [], []                           # by sequence, with the time when it is on disk; None: lost
        s.removed = 0                                       # retention has removed all up to this sequence
        s.records = [Record(0, {Checkpoint(0, 0, (), 0, settings): 0}, set())]  # revisions; the bucket keeps its history
        s.confirmed = 0
        s.wires = []                                        # what dead sessions sent, still on its way
        s.lost = 0
    def newest(s):
        """The sequence of the newest message that can be read, 0 if none can."""
        return next((q for q in range(len(s.msgs), s.removed, -1) if s.msgs[q - 1]), 0)
    def arrive(s, wire):
        """One message reaches the server, which stores it only at the sequence that its sender predicted."""
        m, expected_last, acks = wire.pop(0)
        ok = expected_last == len(s.msgs)
        if ok: s.msgs.append(m); s.synced.append(s.now + s.durable_after)
        if acks is not None: acks.append((expected_last + 1, ok))
    def step(s, own, kill):
        s.now += 1
        if s.rnd.random() < 0.02 and own: own.pop(s.rnd.randrange(len(own)))
        for wire in [own] + s.wires:
            while wire and s.rnd.random() < 0.5: s.arrive(wire)
        s.wires = [x for x in s.wires if x]
        if kill and s.rnd.random() < kill: raise Killed
    def surviving(s): return max(i for i, r in enumerate(s.records) if r.synced <= s.now)   # the oldest revision that a failure may leave
    def power_loss(s):
        """The broker forgets what it stored less than durable_after ago, from any point on; stream and record separately."""
        cut = s.rnd.randint(sum(t <= s.now for t in s.synced), len(s.msgs))
        s.lost += len(s.msgs) - cut
        if s.rnd.random() < 0.3 and any(s.msgs[s.removed:cut]):     # the index survived: the sequence does not go back
            s.msgs[cut:] = [None] * (len(s.msgs) - cut)
            s.wires = []                                    # what was on its way to a server that died is gone
        else: del s.msgs[cut:], s.synced[cut:]
        s.removed = min(s.removed, cut)
        del s.records[s.rnd.randint(s.surviving(), len(s.records) - 1) + 1:]
        s.synced = [s.now] * len(s.msgs)                    # what has survived is on disk
        for r in s.records: r.synced = min(r.synced, s.now)
    def retention(s):
        """Removes from the front what is synced, but nothing that has to be remembered: neither by a checkpoint nor by one still to be made."""
        if s.newest() < len(s.msgs): return
        upto = s.rnd.randint(0, sum(t <= s.now for t in s.synced))
        for p in {p for r in s.records[s.surviving():] for p in r.checkpoints}:
            there = [i for i, m in enumerate(s.msgs[:p.seq]) if m]
            if bent != "retention": upto = min(upto, there[-p.remembered] if 0 < p.remembered <= len(there) else p.seq)
        s.removed = max(s.removed, upto)


def session(w, kill):
    """One life of the process."""
    rnd, rec, last = w.rnd, w.records[-1], len(w.msgs)
    since = dict(rec.checkpoints)                           # those that are stored: since when
    def durable(q): return since.get(q, w.now) <= w.now - w.durable_after
    # An empty stream was emptied by retention. If messages are missing only at its end, those younger than durable_after are lost.
    end = last
    if 0 < w.newest() < last: end = max([w.newest()] + [q.seq for q in since if q.seq <= last and durable(q)])
    points = [q for q in rec.checkpoints if q.seq <= end]
    assert points and start(points[-1]) >= w.confirmed, "no checkpoint left at or above the confirmed LSN"
    holes = {q for q in rec.holes if q <= last} | set(range(end + 1, last + 1))
    if holes != rec.holes or len(points) < len(rec.checkpoints):        # noted before anything is sent
        since = {q: since[q] for q in points}
        w.records.append(Record(w.now, dict(since), holes))
    # Rather a checkpoint that leaves a message to make again and compare: so another WAL behind the same names is noticed.
    p = next((q for q in reversed(points) if w.confirmed <= start(q) and q.seq < end), points[-1])
    there = sum(q not in holes for q in range(p.seq + 1, end + 1))      # so many of the messages to come are there
    g = Gap(p.settings, rnd.random() < 0.5)
    g.restore(p, [m for m in reversed(w.msgs[w.removed:p.seq]) if m])
    made, proved = 0, there                                 # messages made from the checkpoint on
    ready, wire, acks, ends = [], [], [], []                # ends: (made, checkpoint) not proved yet
    def at(n): return last + n - there                      # the sequence that the n-th of them has or gets, if it is new

    def hear():
        nonlocal proved
        while acks:
            seq, ok = acks.pop(0)
            if not ok: raise Restart
            proved = max(proved, seq - last + there)
        while ends and ends[0][0] <= proved: points.append(ends.pop(0)[1])
    def send(reply):
        if ready: wire.append((*ready.pop(), acks if reply else None))
        w.step(wire, kill); hear()
    def store():
        # Checkpoints may begin at the same LSN. The one to keep is the newest durable one, not the newest that begins at what is confirmed.
        known = max([i for i, q in enumerate(points) if start(q) <= w.confirmed and (durable(q) or bent == "durable")], default=0)
        smaller = max([i for i, q in enumerate(points) if q.seq < points[-1].seq], default=0)
        del points[:min(known, smaller)]
        if points[-1] not in since:
            for i in range(len(points) - 3, 1, -1):         # not each one is stored, but the two newest are
                if points[i] not in since: del points[i]
            for q in points: since.setdefault(q, w.now)
            w.records.append(Record(w.now + w.durable_after, {q: since[q] for q in points}, holes))
        old = [q.at if bent == "confirm" else start(q) for q in points if durable(q)]
        if old: w.confirmed = max(w.confirmed, old[-1])

    try:
        for k, x in enumerate(w.wal):
            if x.lsn <= (p.at if bent == "start" else start(p)) and not x.cut: continue
            if known(p, x): g.hold_again(p, x); continue
            for m in g.add(x):
                made += 1
                if made <= there:
                    assert made < there or end <= w.removed or not w.msgs[end - 1] or w.msgs[end - 1] == m, "the stream ends with another message"
                    continue
                send(rnd.random() < 0.3)
                ready.append((m, at(made) - 1))
            if made >= there:
                edge = max(x.lsn, w.wal[k + 1].lsn - 1) if k + 1 < len(w.wal) and rnd.random() < 0.3 else x.lsn     # a keepalive's
                q = g.checkpoint(edge, at(made))
                if q and q.at > points[-1].at: ends.append((made, q))
                if rnd.random() < 0.5: send(True)
                hear()
                if rnd.random() < 0.4: store()
                w.step(wire, kill)
        send(True)
        for _ in range(100):
            if made <= proved: break
            w.step(wire, kill); hear()
        else: raise Restart
        store()
    finally:
        if wire: w.wires.append([x[:2] + (None,) for x in wire])
    return g


def random_settings(rnd):
    return Settings(rnd.choice(["gap", "gap", "gap", "horizon"]), rnd.choice([0.5, 5, 50]), rnd.choice([0, 0.5]), rnd.choice([3, 20, 1000, 1000]),
                    rnd.randint(0, 1), rnd.choice(["sequence", "document"]), rnd.choice([5, 20, 1000, 1000]), rnd.choice([400, 10**6, 10**6]))


def make_wal(rnd, n):
    """Transactions overtake one another, some abort for good (a gap for ever), some counters come twice, documents fall silent."""
    wal, lsn, t, counters, pending = [], 0, 0.0, {}, []
    lost, again, docs, actors = rnd.choice([0, 0, 0.05]), rnd.choice([0, 0, 0.03]), rnd.choice([1, 2, 8]), rnd.randint(1, 3)
    spans, nulls, changes, begin = rnd.choice([1, 1, 3]), rnd.choice([0, 0, 0.1]), rnd.choice([0, 0, 0, 0.1]), rnd.randint(0, 1)
    cuts = rnd.choice([0, 0, 0.1])
    def add(events, now, settings=None):
        nonlocal lsn
        lsn += rnd.randint(2, 6)
        wal.append(Input(lsn, now, tuple(events), settings))
    for _ in range(n):
        t += rnd.expovariate(1)
        if rnd.random() < changes: add((), t, random_settings(rnd)); continue
        if rnd.random() < 0.1: add((), t); continue
        if wal and rnd.random() < cuts: wal.append(Input(max(wal[-1].lsn, lsn + rnd.randint(0, 1)), t, (), None, True)); continue
        ev = []
        for _ in range(rnd.choice([1, 1, 2, 3, 12])):
            q = "d%d" % rnd.randrange(docs), "a%d" % rnd.randrange(actors)
            span, size = rnd.randint(1, spans), rnd.randint(70, 120)
            if rnd.random() < nulls: ev.append((*q, None, 0, size)); continue
            c = counters.setdefault(q, begin if rnd.random() < 0.8 else 7)
            counters[q] += span
            if rnd.random() >= lost: ev.append((*q, c, span, size))
            if rnd.random() < again: ev.append((*q, rnd.randint(min(begin, c), c), rnd.randint(1, spans), size))
        if rnd.random() < 0.5: rnd.shuffle(ev)
        if rnd.random() < 0.3: pending.append(ev); continue
        add(ev, t + rnd.uniform(-0.3, 0))                   # commit timestamps need not ascend
        if pending and rnd.random() < 0.6: add(pending.pop(rnd.randrange(len(pending))), t + 0.01)
    for ev in pending: add(ev, t)
    add((), t + 1000)
    return wal


def check(wal, first, g, msgs):
    """The claims about the undisturbed stream, by naive lists."""
    assert not g.held and sorted(m.pos for m in msgs) == sorted((x.lsn, i) for x in wal for i in range(len(x.events))), "not each event once"
    at, now = {}, first                                     # lsn -> the settings by which its window was released
    for x in wal:
        at.setdefault(x.lsn, now)                           # a cut may have the LSN of an input
        now = x.settings or now
    all_set = [first] + [x.settings for x in wal if x.settings]
    for c in [x for x in wal if x.cut]: assert all(m.at <= c.lsn for m in msgs if m.pos[0] <= c.lsn), "claim 7: something is held behind a cut"
    events = [e for x in wal for e in spans_of(x)]
    sorted_ = {x.lsn for x in wal if is_large(events_of(x), at[x.lsn])}
    check_document(msgs, at, {e.pos: e for e in events}, sorted_)
    if any(z.mode == "horizon" or z.memory <= len(events) for z in all_set): return
    # From here on nothing is forgotten.
    own = {}
    for e in events: own.setdefault(e.q, []).append(e)
    late = {m.q for m in msgs if m.late}
    top, line = {}, {e.pos: e for e in events}
    for m in msgs:
        e = line[m.pos]
        if e.c is None or m.late: continue
        assert e.l > top.get(e.q, e.c - 1), "claim 3: the counters of a sequence do not ascend"
        if e.q not in g.given and e.q not in late: assert e.c <= top.get(e.q, e.c) + 1, "claim 3: a gap"
        top[e.q] = e.l
    if len(all_set) > 1: return
    # From here on the settings never change.
    def group(q): return q[0] if first.scope == "document" else q
    counted = {q: [e for e in own[q] if e.c is not None] for q in own}
    warm = {q for q, es in counted.items() if not es or es[0].c <= first.first and es[0].c == min(e.c for e in es)}
    groups = {}
    for q in own: groups.setdefault(group(q), []).append(q)
    left = {m.pos: m.at for m in msgs}
    fits = len(events) <= first.max_events and sum(e.size for e in events) <= first.max_bytes
    for m in msgs:
        e = line[m.pos]
        if m.late and fits and e.q in warm and not any(f.pos != e.pos and f.c <= e.l and e.c <= f.l for f in counted[e.q]):
            waiting = [f for q in groups[group(e.q)] for f in counted[q] if f.pos < e.pos]
            assert any(x.cut or x.time - f.time >= first.bound for x in wal if x.lsn < e.pos[0] for f in waiting if f.pos[0] <= x.lsn <= left[f.pos]), \
                "claim 4: late though nothing has waited for the bound"
        if m.at > m.pos[0] and not m.late and all(q in warm for q in groups[group(e.q)]):
            assert any(gap([f for f in counted[q] if f.pos[0] <= m.pos[0]]) for q in groups[group(e.q)]), "claim 5: held for nothing"


def spans_of(x):
    return [Event((x.lsn, i), (d, a), c, None if c is None else c + span - 1, size, x.time) for i, (d, a, c, span, size) in enumerate(x.events)]


def gap(events):
    """Whether a counter is missing between those of a sequence's first event and the others."""
    if not events: return False
    top = events[0].l
    for e in sorted(events[1:], key=lambda e: e.c):
        if e.c > top + 1: return True
        top = max(top, e.l)
    return False


def check_document(msgs, at, line, sorted_):
    behind = {}                                             # document -> the oldest event that is later in the stream
    for m in reversed(msgs):
        e, d = line[m.pos], m.q[0]
        o = behind.get(d)
        if m.c is not None and not m.late and at[m.at].scope == "document" and o and o.pos < e.pos and not (o.pos[0] == e.pos[0] in sorted_):
            assert o.q == e.q and (o.c, o.pos) > (e.c, e.pos), "claim 6: an event passes an earlier one of its document"
        if o is None or e.pos < o.pos: behind[d] = e


def trial(seed, total):
    rnd = random.Random(seed)
    wal, st = make_wal(rnd, rnd.randint(5, 40)), random_settings(rnd)
    calm = World(wal, st, random.Random(1), 0)
    calm.step = lambda own, kill: [calm.arrive(own) for _ in list(own)]
    g = session(calm, 0)
    check(wal, st, g, calm.msgs)
    go_on_anywhere(wal, st, calm.msgs, random.Random(seed))
    w = World(wal, st, rnd, rnd.choice([0, 10, 60]))
    for life in range(3000):
        try: session(w, 0.02 if life < 100 else 0); break
        except Killed: total["kills"] += 1
        except Restart: total["restarts"] += 1
        if rnd.random() < 0.2: w.retention()
        if rnd.random() < 0.2: w.power_loss()
    total["messages"] += len(calm.msgs); total["late"] += sum(m.late for m in calm.msgs); total["lost"] += w.lost
    total["held"] += sum(m.at > m.pos[0] for m in calm.msgs); total["removed"] += w.removed
    assert all(m is None or m == n for m, n in zip_stream(w, calm)), "the streams differ"


def go_on_anywhere(wal, st, msgs, rnd):
    """Claim 1 without a world around it: from a few checkpoints of the undisturbed run."""
    g, points, made = Gap(st), [], 0
    for x in wal:
        made += len(g.add(x))
        p = g.checkpoint(x.lsn, made)
        if p: points.append(p)
    for p in rnd.sample(points, min(2, len(points))):
        g, rest = Gap(p.settings), []
        g.restore(p, msgs[:p.seq][::-1])
        for x in wal:
            if not known(p, x): rest += g.add(x)
            elif x.lsn > start(p): g.hold_again(p, x)
        assert rest == msgs[p.seq:], "another stream from a checkpoint"


def zip_stream(w, calm):
    """The messages that are left, each with the one that it ought to be."""
    left = [m for m in w.msgs if m]
    assert len(left) == len(calm.msgs), "the streams differ"
    return zip(left, calm.msgs)


def trials(n, first=0):
    total = dict(messages=0, held=0, late=0, kills=0, restarts=0, lost=0, removed=0)
    for seed in range(first, first + n):
        try: trial(seed, total)
        except AssertionError as err: raise AssertionError("seed %d: %s" % (seed, err)) from err
    return total


def mutations(n=3000):
    """Each rule that is taken away must be missed."""
    global bent
    survivors = []
    for bent, what in MUTATIONS.items():
        try: trials(n)
        except Exception as err: print("%-11s fails: %s: %s" % (bent, err or type(err).__name__, what))
        else: survivors.append(bent); print("%-11s SURVIVES %d trials: %s" % (bent, n, what))
    if survivors: sys.exit("these are not missed: " + ", ".join(survivors))


def order():
    """A line: {"settings": {...}, "inputs": [{"lsn", "time", "events": [[doc, actor, counter or null, span, size], ...], "settings"}, ...]}.
    Printed of each: the messages [lsn, index, at, n, of, mode, late], and the holds [lsn, index, doc, actor, base or null] after each input."""
    for line in sys.stdin:
        wal = json.loads(line)
        g, msgs, holds = Gap(Settings(**wal["settings"])), [], []
        for x in wal["inputs"]:
            x = Input(x["lsn"], x["time"], x["events"], Settings(**x["settings"]) if x.get("settings") else None, x.get("cut", False))
            msgs += [[*m.pos, m.at, m.n, m.of, m.mode, m.late] for m in g.add(x)]
            holds.append(sorted([*min(e.pos for h in g.held.values() for e in h if e.q == q), *q, b] for q, b in g.base.items()))
        print(json.dumps({"messages": msgs, "holds": holds}), flush=True)


def main():
    if sys.argv[1:] == ["mutations"]: return mutations()
    if sys.argv[1:] == ["order"]: return order()
    n, first = [int(a) for a in sys.argv[1:] + ["2000", "0"][max(0, len(sys.argv) - 1):]]
    print("%d trials from seed %d: every claim holds; %s" % (n, first, trials(n, first)))


if __name__ == "__main__": main()
