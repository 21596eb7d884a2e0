"""A runnable model of clusters that share nothing: each has a database and a NATS, and their rows are replicated to one another in order.

A home publishes its own events at once, and writes watermarks: up to here I have published. The others hold its events until a watermark
covers them, or until they may claim them. A claim is a row as well, for a range of one home's events. It acts where its writer reads it in its own
WAL: what it holds of the range there, it publishes.
- A home that is silent may be claimed from. Its silence is the time since the newest row was read that its Outflow wrote of its own events, by the clock of who
  reads, in slots of `delay`: the k-th slot belongs to the k-th cluster behind the home, which may claim in its first quarter, if it has read its own
  WAL to the end. Its events are no signs of life: its database may live and its Outflow be dead. Who was down, or whose database was, or who reads a backlog, does
  not know when a row came: it counts anew, and a whole circle of slots more. Its turns are at other times than those of the rest from then on: so it claims only
  what the rest have had for a circle, until it reads a row in time again.
- A claim is committed within a quarter of `delay`, or never. It names the newest hello of the home that its writer has read: behind its writer's echo of a
  later one it is void, for everybody.
- A home whose own NATS is away for `delay` writes a yield: the next cluster may claim at once, and goes on doing so. From there on the
  silence counts from the newest claim, whatever else the home writes.
- A home that has returned, or has yielded, says hello when it can publish again, and publishes nothing until each other cluster has echoed
  that: what they have claimed comes before their echo. Meanwhile it gives signs of life. It leaves out what was claimed.
- A home that has waited for an echo for `delay` yields as well: who does not answer may be gone for days. When all have echoed, it says hello.
- Who starts again goes on from an older copy of its state. It gives a sign of life at once, and else does nothing, neither publishes nor ends a yield, before
  it has read that: a later hello may be there, and claims behind it. If two of its signs of life, without a hello since, were half of `delay` apart
  by its database's clock, or it has yielded, it says hello. Else nobody can have claimed: it says none, and goes on where it was, also waiting for echoes.
- The number of a hello comes from its NATS. Who waits for that for `delay` yields as well, to those who know the hello before.
- Who was gone when a home yielded may not know yet what others have claimed since: it waits for a circle of slots more after the yield and after each claim. It
  was if it had not answered the hello before, or starts within the yield, or started less than three quarters of a slot before (or than a circle, if it has not answered since).

The claims, with one thing broken at a time (a cluster down, its Outflow alone, or its NATS away; until what was written meanwhile has arrived) and
`delay` above four lags: nothing is lost; what has reached a living cluster is published after a circle of slots and two, if it is not behind for all of a turn; no cluster publishes an event twice; and it is there twice, never more often, only if whoever had published it first could not say so: its home's watermark had not left when the home died,
or the acknowledgement had not come when the NATS went away, or a claim had not left when its writer died. With two things broken nothing is lost, and what a living home commits is published after two
circles of slots and four, if another cluster lives, from when the home has read what came while it was gone. With `cut` links between living clusters fail as well, and things break together: then
nothing is lost all the same, and what is there twice is counted. The word of an operator, that a cluster is gone for good, is in internal/claim alone: it
answers for that cluster, which no claim here needs, as a home that waits yields.

Run: python3 islands_model.py [trials [first seed]]      random trials
     python3 islands_model.py mutations                  takes away one rule after the other: each must fail
"""
import pickle, random, sys

MUTATIONS = {
    "echo": "a home that returns publishes at once",
    "token": "an echo of an earlier hello counts",
    "leave": "a home that returns publishes what was claimed as well",
    "watermark": "who claims claims also what a watermark covers",
    "claimed": "who claims claims also what others have claimed",
    "rank": "a slot belongs to everybody",
    "read": "a claim may come before the own WAL is read to its end",
    "fresh": "who returns counts silence from before its return",
    "outlives": "whose Outflow outlives its database counts silence on",
    "behind": "who reads a backlog counts silence as if it had just come",
    "range": "a claim's range is greater than what is published for it",
    "order": "rows are not replicated in their order",
    "away": "a home that has yielded publishes again as soon as its NATS is back",
    "turn": "everybody may claim as soon as a yield is read",
    "over": "a hello does not end a yield",
    "unread": "a home that returns does not read what its NATS has stored",
    "signs": "an event is a sign of life of its home",
    "silent": "a home that waits for echoes gives no signs of life",
    "soon": "a home that starts again says no hello, however long it was away",
    "still": "a home that starts again soon does not wait for the echoes that it waited for",
    "late": "a claim counts behind its writer's echo of a later hello",
    "slow": "a claim may be committed at any later time",
    "forget": "what was claimed and could not be published is forgotten",
    "wait": "a home that waits for an echo does not yield",
    "stale": "who was gone when a home yielded takes its turn at once",
    "hurry": "a yield ends before what was there at the start is read",
    "number": "a home that waits for the number of a hello does not yield",
    "pace": "whose turns are at other times claims what has just come",
    "chain": "a process that had to say hello and died before has ended the silence",
    "gone": "a home that has yielded and starts again soon says no hello",
}
bent = None                                                             # the rule that is taken away
steps = 600                                                             # of a trial; some rules are missed in longer ones only
KEPT = "read done todo duty held mark seen yielded stale claims echoed hello token due gave echoes".split()    # its state, of which an older copy is kept


class Cluster:
    def __init__(s, c, n):
        s.c, s.up, s.run, s.wal, s.read = c, True, True, [], 0          # run: its Outflow is
        s.links = {}                                                    # to -> rows on their way: (arrives at, row)
        s.written = s.done = 0                                          # own events; and those published or left out
        s.todo, s.duty, s.held = [], [], [[] for _ in range(n)]         # own events, claimed ones, and foreign ones that are held
        s.mark, s.seen, s.yielded = [0] * n, [0] * n, [None] * n        # by home: watermark, when its newest row was read, and its yield
        s.claims = [[] for _ in range(n)]                               # by home: ranges, both ends included
        s.echoed = [[0] * n for _ in range(n)]                           # by home: of which hello each cluster has written an echo
        s.ended = -1 << 30                                              # when its own WAL was last read to the end
        s.hello, s.late, s.came = [0] * n, {}, {}                       # by home: its newest hello; its claim that is on its way; when an event came
        s.token, s.echoes, s.sent = 0, None, 0                          # echoes: who has echoed, None: none are awaited; sent: the last watermark
        s.nats, s.away, s.stored, s.gave = True, 0, set(), False        # stored: all that its NATS has; gave: it has yielded
        s.signed = -1 << 30                                             # its newest sign of life
        s.asked, s.whole, s.born = 0, 0, {}                             # since when it waits, and nothing of it is broken; when an event was committed
        s.lives = False                                                 # its Outflow has outlived its database
        s.mended, s.off = -1 << 30, [False] * n                         # off: its turns are at other times than those of the rest
        s.missed = [-1 << 30] * n                                       # by home: its newest turn in all of which it was behind
        s.start, s.number, s.gap, s.due = None, 0, False, False         # start: the end of its WAL then, until that is read; due: a hello is
        s.began, s.answered, s.stale = -1 << 30, [0] * n, [False] * n    # by home: its newest own echo since its start; it was gone at the yield
        s.keep()

    def keep(s): s.kept = pickle.dumps([getattr(s, k) for k in KEPT])

    def heard(s, w, h):
        s.off[h] = s.stale[h] or w.now - s.ended > w.delay / 8 and bent != "behind"
        return w.now + s.off[h] * (w.n - 1) * w.delay

    def may(s): return s.start is None and s.echoes is None and not s.due and not s.gave

    def claimed(s, h, p): return any(lo <= p <= hi for lo, hi in s.claims[h])


class World:
    def __init__(s, seed, harm):
        s.rnd = rnd = random.Random(seed)
        s.most, s.cut, s.now, s.calm = {"one": 1, "two": 2, "cut": 9}[harm], harm == "cut", 0, False
        s.n, s.lag, s.beat = rnd.choice([2, 3, 4]), rnd.choice([2, 10, 20]), rnd.choice([1, 5, 15])
        s.delay = 4 * (s.lag + s.beat) + 10
        s.clusters = [Cluster(c, s.n) for c in range(s.n)]
        s.by, s.unsure, s.broken, s.faults = {}, set(), set(), {}       # by: event -> who has published it; faults: cluster -> (which, until)
        s.count = dict(claims=0, yields=0, downs=0, soon=0)

    def write(s, c, *row):
        """A commit of c: into its WAL, and on its way to the others."""
        c.wal.append((c.c, row))
        for d in s.clusters:
            if d is not c: c.links.setdefault(d.c, []).append((s.now + s.rnd.randint(1, s.lag), row))

    def publish(s, c, h, p):
        if (h, p) in c.stored and (bent != "unread" or h != c.c): return
        c.stored.add((h, p))
        s.by.setdefault((h, p), []).append(c.c)

    # what breaks
    def fail(s, c, kind):
        s.faults[c.c] = kind, s.now + s.rnd.choice([5, 50, 200, 500])
        c.begun = s.now
        if kind != "nats":
            s.count["downs"] += 1
            c.run, c.up = False, kind == "relay"
            s.unsure |= {(c.c, p) for p in range(c.sent + 1, c.done + 1)}
            for d in c.links if kind == "down" else ():                 # what was on its way stays in its slot
                c.links[d] = [(1 << 30, r) for _, r in c.links[d]]
                top = max([r[1] for _, r in c.links[d] if r[0] == "watermark"], default=0)
                s.unsure |= {(c.c, p) for p in range(s.clusters[d].mark[c.c] + 1, top + 1)}
                s.unsure |= {(r[1], p) for _, r in c.links[d] if r[0] == "claim" for p in range(r[2], r[3] + 1)}
            if kind == "down":
                c.late, c.lives = {}, s.rnd.random() < .5
                if c.lives: c.keep()                                    # its Outflow lives, and has lost nothing
                return
        else: c.nats, c.away = False, s.now
        for p in c.todo[:s.rnd.choice([0, 0, 1, 3])] if c.may() else (): # sent and stored, and the acknowledgement did not come
            if not c.claimed(c.c, p):
                s.publish(c, c.c, p)
                s.unsure.add((c.c, p))

    def mend(s, c):
        kind, begun = s.faults.pop(c.c)[0], c.begun
        c.whole = c.mended = c.asked = s.now
        for d in s.clusters:
            for p in d.held[c.c] if s.most == 1 and d is not c else ():
                assert (c.c, p) in s.by or s.now - max(d.came[c.c, p], begun, d.missed[c.c]) < (s.n + 2) * s.delay, "nobody publishes %d of %d: %s" % (p, c.c, kind)
        if kind == "nats":
            c.nats = True
            return
        for d in c.links if kind == "down" else (): c.links[d] = [(s.now + s.rnd.randint(1, s.lag), r) for _, r in c.links[d]]
        for d in s.clusters:                                            # what the others have for it comes when the connections are there again
            if c.c in d.links and kind == "down":
                at = s.now + s.rnd.randint(1, s.lag)
                d.links[c.c] = [(max(t, at), r) for t, r in d.links[c.c]]
        c.up = c.run = True
        for k, v in zip(KEPT, pickle.loads(c.kept)): setattr(c, k, v)
        c.began, c.answered, c.start = s.now, [-1] * s.n, len(c.wal)
        c.stale = [y is not None and bent != "stale" for y in c.yielded]
        if bent != "fresh" and not (bent == "outlives" and kind == "down" and c.lives):
            c.ended = -1 << 30
            c.seen = [c.heard(s, h) for h in range(s.n)]
            c.yielded = [None if y is None else c.seen[h] for h, y in enumerate(c.yielded)]
        if bent == "still": c.echoes = None
        c.gap = (c.gap and bent != "chain" or s.now - c.signed >= s.delay / 2) and bent != "soon"
        s.sign(c)

    def sign(s, c):
        c.sent, c.signed = max(c.sent, c.done), s.now
        s.write(c, "watermark", c.done)

    def greet(s, c): c.start, c.due, c.gave, c.echoes, c.asked = None, True, False, None, s.now

    def heed(s, c, token): c.token, c.due, c.gave, c.echoes, c.asked = token, False, False, set(), s.now

    def hello(s, c):
        c.number += 1                                                   # greater than each before, also than what a start has not read yet
        s.heed(c, c.number)
        c.gap, c.signed = False, s.now
        s.write(c, "hello", c.number)

    # a cluster
    def take(s, c, home, row):
        """One row of the WAL."""
        kind, own = row[0], home == c.c
        if kind == "hello": c.stale[home] = False
        if kind == "hello" and bent != "over": c.yielded[home] = None
        sign = kind in ("watermark", "hello") or kind == "event" and bent == "signs"     # not what it says of others
        if sign and c.yielded[home] is None: c.seen[home] = c.heard(s, home)
        if kind == "event":
            (c.todo if own else c.held[home]).append(row[1])
            c.came.setdefault((home, row[1]), s.now)
        elif own and kind == "echo":
            c.echoed[home][row[1]] = max(c.echoed[home][row[1]], row[2])
            if c.ended >= 0: c.answered[row[1]] = row[2]
        elif own and kind == "hello" and row[1] > c.token: s.heed(c, row[1])        # of a process before this one
        elif own and kind == "yield" and row[1] == c.token: c.gave = True
        elif own and kind != "claim": return
        elif kind == "watermark":
            c.mark[home] = max(c.mark[home], row[1])
            if bent != "watermark": c.held[home] = [p for p in c.held[home] if p > row[1]]
        elif kind == "claim":
            _, h, lo, hi, token = row
            if own and c.late.get(h, (0, 0))[1] == row: del c.late[h]
            if token < c.echoed[home][h] and bent != "late": return      # the home may have published them
            if own: mine = [p for p in c.held[h] if lo <= p <= hi - (2 if bent == "range" else 0)]
            if own and not (bent == "forget" and s.rnd.random() < .1): c.duty += [(h, p) for p in mine]
            c.claims[h].append((lo, hi))
            c.seen[h] = c.heard(s, h)
            if c.yielded[h] is not None: c.yielded[h] = c.heard(s, h)
            if own or bent != "claimed": c.held[h] = [p for p in c.held[h] if not lo <= p <= hi]
        elif kind == "yield":
            age = s.now - c.began
            away = c.echoed[c.c][home] < row[1] or age < s.delay * 3 / 4 or c.answered[home] < row[1] and age < (s.n - 1) * s.delay
            c.stale[home] |= away and bent != "stale"
            c.yielded[home] = c.heard(s, home)
        elif kind == "hello":
            c.hello[home] = row[1]
            s.write(c, "echo", home, row[1])
        elif kind == "echo":
            c.echoed[home][row[1]] = max(c.echoed[home][row[1]], row[2])
            if row[1] == c.c and c.echoes is not None and (row[2] == c.token or bent == "token"): c.echoes.add(home)

    def own(s, c):
        """Publishes own events and what was claimed, and writes what the others have to know."""
        if c.echoes is not None and (len(c.echoes) == s.n - 1 or bent == "echo"): c.echoes = None
        if c.start is not None and c.read > c.start:                    # behind its first sign of life
            c.start, c.gave = None, c.gave and bent != "gone"
            if c.gap or c.due or c.gave: s.greet(c)
            else: s.count["soon"] += 1
        if c.due and c.nats and s.rnd.random() < .2: s.hello(c)         # the number of one comes from NATS
        waits = c.echoes is not None or c.due
        late = s.now - c.asked >= s.delay and bent != ("number" if c.due else "wait")
        if c.start is None and not c.gave and (late if waits else not c.nats and s.now - c.away >= s.delay):
            s.write(c, "watermark", c.done)
            s.write(c, "yield", c.token)
            s.count["yields"] += 1
            c.gave = True
        if c.nats and c.gave and not waits and (c.start is None or bent == "hurry"):
            if bent == "away": c.gave = False
            else: s.greet(c)
        if s.now % s.beat == 0 and (c.echoes is None or bent != "silent"): s.sign(c)     # also while it waits for echoes
        if not c.nats: return
        while c.duty and s.rnd.random() < .9: s.publish(c, *c.duty.pop(0))
        while c.todo and c.may() and s.rnd.random() < .9:
            p = c.todo.pop(0)
            if not c.claimed(c.c, p) or bent == "leave": s.publish(c, c.c, p)
            c.done = p

    def claim(s, c, h):
        since = c.seen[h] if c.yielded[h] is None else c.yielded[h] - s.delay      # a yield is a slot of silence
        slot, into = divmod(s.now - since, s.delay)
        turn = (slot - 1) % (s.n - 1) + 1 == (c.c - h) % s.n or bent == "rank" or bent == "turn" and c.yielded[h] is not None
        if slot >= 1 and turn and into == -(-s.delay // 4) - 1 and c.ended < s.now - into: c.missed[h] = s.now
        if h in c.late or slot < 1 or not turn or into >= s.delay / 4 or c.read < len(c.wal) and bent != "read": return
        lo = max([c.mark[h] if bent != "watermark" else 0] + [hi for _, hi in c.claims[h] if bent != "claimed"]) + 1
        mine = [p for p in c.held[h] if p >= lo]
        if not mine or c.off[h] and s.now - c.came[h, mine[0]] < (s.n - 1) * s.delay and bent != "pace": return
        hi = mine[-1] + (2 if bent == "range" else 0)
        slow = bent == "slow" and s.rnd.random() < .1
        c.late[(h, s.now) if slow else h] = s.now + (2 * s.delay if slow else s.rnd.randrange(1, s.delay // 4)), ("claim", h, lo, hi, c.hello[h])
        s.count["claims"] += 1

    # all of them
    def idle(s):
        """What a living home has committed is published in time, if another cluster lives."""
        for c in s.clusters:
            if c.start is not None: c.whole = s.now                     # it reads what came while it was gone, and says that it lives
        for c in s.clusters:
            whole = [d.whole for d in s.clusters if d is not c and d.c not in s.faults]
            if c.c in s.faults or not whole: continue
            p = next((p for p in c.todo if (c.c, p) not in s.by), None)
            assert p is None or s.now - max(c.born[p], c.whole, min(whole)) < (2 * s.n + 4) * s.delay, "%d of %d is not published, and its home lives" % (p, c.c)

    def step(s):
        rnd = s.rnd
        s.now += 1
        for c in s.clusters:
            if c.c in s.faults and (s.calm or s.now >= s.faults[c.c][1]): s.mend(c)
        if not s.cut: s.idle()
        soon = s.most == 1 and any(s.now - d.mended <= 2 * s.lag for d in s.clusters)    # what was written meanwhile is still on its way
        if not s.calm and rnd.random() < .004 and len(s.faults) < s.most and not soon:
            c = rnd.choice(s.clusters)
            if c.c not in s.faults: s.fail(c, rnd.choice(["down", "relay", "nats"]))
        if s.cut and not s.calm and rnd.random() < .01: s.broken ^= {(rnd.randrange(s.n), rnd.randrange(s.n))}
        if s.calm: s.broken = set()
        for c in s.clusters:
            if not c.up: continue
            if not s.calm and rnd.random() < .1:
                c.written += 1
                c.born[c.written] = s.now
                s.write(c, "event", c.written)
            for d in s.clusters:
                q = d.links.get(c.c, [])
                if not d.up or (d.c, c.c) in s.broken: continue
                if bent == "order" and len(q) > 1 and rnd.random() < .1: q[0], q[1] = q[1], q[0]
                while q and q[0][0] <= s.now: c.wal.append((d.c, q.pop(0)[1]))
            for at, row in list(c.late.values()):
                if at == s.now: s.write(c, *row)
            if not c.run: continue
            while c.read < len(c.wal) and (s.calm or rnd.random() < .9):
                c.read += 1
                s.take(c, *c.wal[c.read - 1])
            if c.nats and c.read == len(c.wal) or bent == "read": c.ended = s.now
            for h in range(s.n):
                if h != c.c and c.nats: s.claim(c, h)
            s.own(c)
            if rnd.random() < .05: c.keep()


def trial(seed, harm):
    w = World(seed, harm)
    for _ in range(steps): w.step()
    w.calm = True                                                       # everything is mended and nobody writes: it must come to rest
    for _ in range(10 * w.delay): w.step()
    events = {(c.c, p) for c in w.clusters for p in range(1, c.written + 1)}
    assert set(w.by) == events, "lost: %s" % sorted(events - set(w.by))[:5]
    assert all(len(set(who)) == len(who) for who in w.by.values()), "twice by the same cluster"
    double = {e for e, who in w.by.items() if len(who) > 1}
    if harm == "one":
        assert double <= w.unsure, "twice without a reason: %s" % [(e, w.by[e]) for e in sorted(double - w.unsure)[:5]]
        assert all(len(who) <= 2 for who in w.by.values()), "two successors"
    return dict(w.count, events=len(events), twice=len(double), copies=sum(len(who) - 1 for who in w.by.values()))


def trials(n, first=0, harm="one"):
    total = {}
    for seed in range(first, first + n):
        try: r = trial(seed, harm)
        except AssertionError as err: raise AssertionError("seed %d: %s" % (seed, err)) from err
        for k, v in r.items(): total[k] = total.get(k, 0) + v
    return total


def mutations(n=3000):
    global bent, steps
    alive, steps = [], 2000
    for bent, what in MUTATIONS.items():
        try: trials(n, harm="two" if bent == "wait" else "one")
        except AssertionError as err: print("%-9s fails: %s: %s" % (bent, err, what), flush=True)
        else: alive.append(bent); print("%-9s SURVIVES %d trials: %s" % (bent, n, what), flush=True)
    if alive: sys.exit("these are not missed: " + ", ".join(alive))


def main():
    if sys.argv[1:] == ["mutations"]: return mutations()
    n, first = [int(a) for a in sys.argv[1:] + ["300", "0"][max(0, len(sys.argv) - 1):]]
    for harm, what in ("one", "one thing broken at a time"), ("two", "two things broken"), ("cut", "links cut as well"):
        print("%s: %d trials from seed %d: every claim holds; %s" % (what, n, first, trials(n, first, harm)), flush=True)


if __name__ == "__main__": main()
