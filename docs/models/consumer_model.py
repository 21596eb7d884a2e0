"""A runnable model of consumers that share partitions: what a row of marks must hold so that instances may come, go, die and sleep.

Documents are divided into partitions by a layout (how a document is hashed, and into how many). Each partition has a mark, a row that
moves in the transaction of the effect: up to this message of the stream, all events of the partition are done. An instance claims a
partition by writing itself and a new epoch into the row; nobody asks the clock, so a claim may come at any moment, also while the last
owner is alive, asleep, or in the middle of a transaction. A transaction locks the row and ends unless the epoch is the one that its
instance knows. So the lease decides who works, and the mark decides what counts.

Another layout begins at a barrier: nothing is done beyond one message until all marks stand at it. Up to there everything is done for
all documents, whatever the layout, so the new marks begin there and nothing of the old layout is needed.

The broker may lose the end of the stream, with or without going back in its sequence; the same events are published again, in the same
order. The database may move to another cluster, where positions begin at lower values.

The claim, checked at each commit and at the end of each trial: each document's effects are its events, each once, in the order of the
stream.

Run: python3 consumer_model.py [trials [first seed]]     random trials
     python3 consumer_model.py mutations                 takes away one rule after the other: each must fail
"""
import random, sys

MUTATIONS = {
    "epoch": "a transaction does not ask for its epoch",
    "claim": "a claim leaves the epoch as it is",
    "lock": "a claim does not wait for a transaction that is open on the row",
    "ask": "a claim does not ask whether the stream still has the mark's message",
    "store": "that the mark's message was lost is not stored",
    "header": "events are compared by header also where nothing was lost",
    "idle": "the mark of an idle partition moves also while its events wait",
    "back": "a lost mark moves to a message that comes before it",
    "switch": "the layout is switched before all marks are at the barrier",
    "fence": "the marks of a new layout begin with an epoch that is in use",
    "filter": "an instance with a lost mark reads only its own partitions",
    "order": "an order that goes back does not end the session",
    "reopen": "an instance goes on reading where it was when it claims an older partition",
}
bent = None                                                 # the rule that is taken away


class Message:
    def __init__(s, seq, event, doc, order): s.seq, s.event, s.doc, s.order = seq, event, doc, order


class Stream:
    """The stream and its publisher, which publishes the events of the log one after the other."""
    def __init__(s):
        s.log, s.messages, s.last, s.next, s.synced, s.epoch = [], [], 0, 0, 0, 0

    def write(s, doc, moved):
        """Somebody commits an event. In another cluster positions begin again."""
        s.epoch += moved
        s.log.append((doc, (0 if moved or not s.log else s.log[-1][1]) + 1))

    def publish(s):
        if s.next < len(s.log):
            doc, order = s.log[s.next]
            s.last += 1
            s.messages.append(Message(s.last, s.next, doc, order))
            s.next += 1

    def lose(s, rng):
        """The broker crashes and loses what it had not synced."""
        cut = rng.randint(s.synced, s.last)
        gone = [m for m in s.messages if m.seq > cut]
        # Outflow publishes again only what its own WAL still brings: all that was lost comes from one cluster
        if not gone or any(a.order >= b.order for a, b in zip(gone, gone[1:])): return
        if gone[-1].event + 1 < len(s.log) and s.log[gone[-1].event + 1][1] < gone[-1].order: return
        s.messages = [m for m in s.messages if m.seq <= cut]
        s.next = gone[0].event
        if rng.random() < .5: s.last = cut                  # else the sequence stays, and leaves a hole
        else: s.synced = s.last                             # the hole is there for good

    def at(s, seq): return next((m for m in s.messages if m.seq == seq), None)
    def after(s, seq): return next((m for m in s.messages if m.seq > seq), None)


class Mark:
    def __init__(s, seq=0, order=0, event=-1, epoch=0):
        s.seq, s.order, s.event, s.epoch, s.lost, s.owner, s.lock = seq, order, event, epoch, False, None, None


class Database:
    def __init__(s, layout):
        s.layout, s.wanted, s.barrier, s.epochs = layout, None, None, 0
        s.marks = [Mark() for _ in range(layout[1])]
        s.effects = {}

    def epoch(s):
        s.epochs += 1
        return s.epochs

    def want(s, layout):
        """Somebody wants another layout: from now on nothing is done beyond the newest mark."""
        s.wanted = layout
        s.barrier = max(m.seq for m in s.marks)

    def switch(s, stream):
        """All marks are at the barrier: the new layout begins there."""
        if s.wanted is None or any(m.lock for m in s.marks): return
        first = max(s.marks, key=lambda m: m.seq)
        s.barrier = max(s.barrier, first.seq)               # a transaction had begun before somebody wanted it
        if any(m.lost for m in s.marks) or not stream.at(s.barrier):
            s.barrier = max(s.barrier, stream.last)         # the broker lost its end: what it had comes again up to there, or behind
        if bent != "switch" and any(m.seq != s.barrier or m.lost for m in s.marks): return
        s.marks = [Mark(first.seq, first.order, first.event, first.epoch if bent == "fence" else s.epoch()) for _ in range(s.wanted[1])]
        s.layout, s.wanted, s.barrier = s.wanted, None, None


def partition(layout, doc): return (doc * layout[0] + doc // 3) % layout[1]


class Claim:
    """What an instance knows of a partition that it owns."""
    def __init__(s, mark): s.epoch, s.seq, s.order, s.event, s.lost, s.queue = mark.epoch, mark.seq, mark.order, mark.event, mark.lost, []


class Instance:
    def __init__(s, world): s.w, s.claims, s.layout, s.at, s.open, s.again = world, {}, None, None, None, {}

    def drop(s):
        if s.open: s.abort()
        s.claims, s.at = {}, None

    def claim(s, p):
        db = s.w.db
        if s.open: return
        if s.claims and s.layout != db.layout: s.drop()
        if p >= len(db.marks): return
        m = db.marks[p]
        if m.lock and bent != "lock": return                # waits for the row, and tries again later
        if bent != "claim": m.epoch = db.epoch()
        m.owner = s
        if bent != "ask" and m.seq:
            found = s.w.stream.at(m.seq)
            if (found is None or found.event != m.event) and s.w.stream.last >= m.seq and bent != "store": m.lost = True
        s.layout = db.layout
        c = s.claims[p] = Claim(m)
        if bent == "store" and m.seq and s.w.stream.last >= m.seq:
            found = s.w.stream.at(m.seq)
            c.lost = s.w.lately and (found is None or found.event != m.event)
        if bent == "reopen" and s.at: return
        s.at = None                                         # reads again from the oldest of its marks
        for c in s.claims.values(): c.queue = []

    def release(s, p):
        c = s.claims.pop(p, None)
        m = s.w.db.marks[p] if p < len(s.w.db.marks) else None
        if c and m and m.epoch == c.epoch and not m.lock: m.owner = None

    def read(s):
        """Reads a message and puts it where it belongs."""
        if not s.claims: return
        stream = s.w.stream
        if s.at is None:
            c = min(s.claims.values(), key=lambda c: c.seq)
            s.at = Message(c.seq, c.event, None, c.order)
            s.again = {p: c.lost for p, c in s.claims.items()}     # may the events of p have come before?
        m = stream.after(s.at.seq)
        if s.w.filtered and (bent == "filter" or not any(c.lost for c in s.claims.values())):
            while m and partition(s.layout, m.doc) not in s.claims: m = stream.after(m.seq)
        if m is None:
            if stream.last < s.at.seq: s.drop()             # the stream went back: the marks are compared anew
            return
        s.at = m
        again = s.again
        s.again = {p: again.get(p) and not (m.seq > c.seq and m.order >= c.order) for p, c in s.claims.items()}   # all came again
        p = partition(s.layout, m.doc)
        if p not in s.claims: return
        c = s.claims[p]
        if not s.follows(p, c.queue[-1] if c.queue else c, m): return s.drop()
        done = m.seq <= c.seq or (again.get(p) or bent == "header") and m.order <= c.order
        if not done: c.queue.append(m)

    def follows(s, p, before, m):
        """A message of a lower order is of another cluster if the one before it is still there. Otherwise the broker has lost its end."""
        if getattr(before, "lost", False) or bent == "order" or not m.seq > before.seq > 0 or m.order > before.order: return True
        found = s.w.stream.at(before.seq)
        return found is not None and found.event == before.event

    def begin(s, p):
        """Begins a transaction on a few events: the row is locked, and compared with what is known."""
        c = s.claims.get(p)
        if s.open or not c or not c.queue: return
        db = s.w.db
        if p >= len(db.marks): return s.drop()
        m = db.marks[p]
        if m.lock: return
        limit = db.barrier
        batch = [e for e in c.queue[:s.w.rng.randint(1, 3)] if limit is None or e.seq <= limit]
        if not batch: return
        if bent != "epoch" and m.epoch != c.epoch: return s.drop()
        m.lock = s
        s.open = p, batch, m

    def abort(s):
        p, _, m = s.open
        if m.lock is s: m.lock = None
        s.open = None

    def commit(s, known):
        """Commits. If the answer is lost, the instance starts again."""
        if not s.open: return
        p, batch, m = s.open
        if m.lock is not s and bent != "lock": return s.drop()        # the server has ended the transaction
        for e in batch: s.w.effect(e)
        last = batch[-1]
        m.seq, m.order, m.event, m.lost = last.seq, last.order, last.event, False
        if m.lock is s: m.lock = None
        s.open = None
        c = s.claims.get(p)
        if not known or not c: return s.drop()
        c.seq, c.order, c.event, c.lost = m.seq, m.order, m.event, False
        c.queue = c.queue[len(batch):]

    def idle(s, p):
        """Moves the mark of a partition that has nothing to do to what was read."""
        c = s.claims.get(p)
        if not c or s.open or s.at is None or c.queue and bent != "idle": return
        db, to = s.w.db, s.at
        if p >= len(db.marks): return s.drop()
        m = db.marks[p]
        if to.seq <= c.seq or m.lock or c.lost and s.again.get(p) and to.order < c.order and bent != "back": return
        if db.barrier is not None and to.seq > db.barrier: return
        if bent != "epoch" and m.epoch != c.epoch or not s.follows(p, c, to): return s.drop()
        m.seq, m.order, m.event, m.lost = to.seq, to.order, to.event, False
        c.seq, c.order, c.event, c.lost = m.seq, m.order, m.event, False


class World:
    def __init__(s, seed):
        s.rng = random.Random(seed)
        s.stream, s.db = Stream(), Database((1, s.rng.randint(1, 4)))
        s.filtered, s.lately = s.rng.random() < .5, True
        s.docs = s.rng.randint(1, 8)
        s.instances = [Instance(s) for _ in range(s.rng.randint(1, 4))]
        s.counts = {}

    def effect(s, m):
        done = s.db.effects.setdefault(m.doc, [])
        due = [e for e, (doc, _) in enumerate(s.stream.log) if doc == m.doc]
        assert len(done) < len(due) and due[len(done)] == m.event, f"document {m.doc}: event {m.event} after {done}"
        done.append(m.event)

    def step(s):
        rng, st, db = s.rng, s.stream, s.db
        i = rng.choice(s.instances)
        p = rng.randrange(len(db.marks))
        mine = rng.choice(list(i.claims)) if i.claims else p
        act = rng.choices(("write", "publish", "sync", "lose", "claim", "release", "read", "begin", "commit", "unknown", "idle", "kill",
                           "timeout", "want", "switch", "move"),
                          (6, 8, 2, .6, 3, .5, 14, 10, 10, .3, 4, .5, .4, .15, 2, .4))[0]
        s.counts[act] = s.counts.get(act, 0) + 1
        if act == "write": st.write(rng.randrange(s.docs), False)
        elif act == "move": st.write(rng.randrange(s.docs), True)
        elif act == "publish": st.publish()
        elif act == "sync": st.synced = st.last
        elif act == "lose": st.lose(rng)
        elif act == "claim": i.claim(p)
        elif act == "release": not i.open and i.release(mine)
        elif act == "read": i.read()
        elif act == "begin": i.begin(mine)
        elif act == "commit": i.commit(True)
        elif act == "unknown": i.commit(False)
        elif act == "idle": i.idle(mine)
        elif act == "kill": i.drop()
        elif act == "timeout":                              # the server ends a transaction that was open for too long
            m = rng.choice(db.marks)
            if m.lock:
                m.lock.open = None
                m.lock.claims, m.lock.at, m.lock = {}, None, None
        elif act == "want" and db.wanted is None: db.want((rng.choice((1, 2, 5)), rng.randint(1, 5)))
        elif act == "switch": db.switch(st)

    def finish(s):
        """Everything that was committed is published and read, by one instance that is left alone."""
        st = s.stream
        for i in s.instances: i.drop()
        while st.next < len(st.log): st.publish()
        st.synced, i = st.last, s.instances[0]
        for _ in range(40):
            for p in range(len(s.db.marks)): i.claim(p)
            for _ in range(4 * len(st.messages) + 8):
                i.read()
                for p in list(i.claims):
                    while i.claims.get(p) and i.claims[p].queue:
                        before = len(i.claims[p].queue)
                        i.begin(p)
                        i.commit(True)
                        if i.claims.get(p) and len(i.claims[p].queue) == before: break
                    i.idle(p)
            s.db.switch(st)
            if s.db.wanted is None and all(m.seq == st.last or not st.messages for m in s.db.marks): break
        for doc in range(s.docs):
            due = [e for e, (d, _) in enumerate(st.log) if d == doc]
            assert s.db.effects.get(doc, []) == due, f"document {doc}: {s.db.effects.get(doc, [])} of {due}"
        assert s.db.wanted is None, f"the layout was not switched: barrier {s.db.barrier}, marks {[(m.seq, m.lost) for m in s.db.marks]}"


def trial(seed):
    w = World(seed)
    for _ in range(w.rng.randint(20, 400)): w.step()
    w.finish()
    return w


def main():
    global bent
    if sys.argv[1:] == ["mutations"]:
        alive = []
        for bent in MUTATIONS:
            for seed in range(20_000):
                try: trial(seed)
                except AssertionError as e:
                    print(f"{bent:9} fails in trial {seed}: {e}")
                    break
            else: alive.append(bent)
        if alive: sys.exit(f"these changed nothing: {', '.join(alive)}")
        return
    trials, first = (int(a) for a in (sys.argv[1:] + ["10000", "0"][len(sys.argv) - 1:])[:2])
    total = {}
    for seed in range(first, first + trials):
        try: w = trial(seed)
        except AssertionError as e: sys.exit(f"seed {seed}: {e}")
        for k, v in w.counts.items(): total[k] = total.get(k, 0) + v
    print(f"{trials} trials, all equal: " + ", ".join(f"{k} {v}" for k, v in sorted(total.items())))


if __name__ == "__main__": main()
