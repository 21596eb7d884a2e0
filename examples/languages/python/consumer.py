# A complete consumer: each event has its effect once and in order, through any crash, and any number of
# instances share the work. docs/consume-any-language.md explains each step.
import asyncio, functools, json, nats, os, psycopg, signal, sys, time, uuid
from application import KEYING, document_of, handle

NAME, STREAM = os.environ.get("NAME", "notes"), os.environ.get("STREAM", "OUTBOX")
LEASE, PARTITIONS = os.environ.get("LEASE", "10 s"), int(os.environ.get("PARTITIONS", "16"))
INSTANCE, stopping, begun = os.environ.get("INSTANCE", str(uuid.uuid4())), asyncio.Event(), []
class Failed(Exception): """The handler has, for this event; and whether the database refuses its data."""
hash_of = lambda s: functools.reduce(lambda h, b: (h ^ b) * 16777619 & 0xFFFFFFFF, s.encode(), 2166136261)

async def sql(db, function, *args):
    query = f"SELECT * FROM outflow.{function}({', '.join(['%s'] * (len(args) + 1))})"
    return await (await db.execute(query, (NAME, *args))).fetchall()

async def ask(nc, method, **request):
    answer = await nc.request(f"$JS.API.STREAM.{method}.{STREAM}", json.dumps(request).encode(), timeout=5)
    return json.loads(answer.data)

# Commits the work, again and again as long as the handler fails: for good after 5 times where the database refuses
# the data, and after a quarter of an hour otherwise, as what it needs may be down.
async def attempt(db, work, failure=None, refused=False):
    for tries in range(1 << 30):
        try:
            async with db.transaction(): return await work(tries, failure, tries >= (5 if refused else 900))
        except Failed as e: failure, refused = e.args
        await asyncio.sleep(min(0.05 * 2**min(tries, 5), 1))
        if stopping.is_set() or (await sql(db, "renew", INSTANCE, LEASE))[0]["renew"]: raise RuntimeError(failure)

async def effects(*args):
    try: await handle(*args)
    except Exception as e: raise Failed(repr(e), str(getattr(e, "sqlstate", ""))[:2] in ("22", "23")) from e

async def apply(db, mark, m, seq, document, tries, failure, for_good):  # an event has its effects, or is parked
    headers = {name: [value] for name, value in m.headers.items()}
    take = await sql(db, "take", mark["partition"], mark["epoch"], mark["seq"], seq, document, m.subject,
                     json.dumps(headers), m.data, m.metadata.timestamp, failure if for_good else None, tries)
    if take[0]["take"]: await effects(db, document, headers, m.data)

async def release(db, mark, tries, failure, _):  # parked, and released by an operator
    for e in await sql(db, "released", mark["partition"], mark["epoch"], mark["seq"]):
        if tries: return await sql(db, "repark", e["ord"], failure, e["attempts"] + 1)
        if not e["skip"]: await effects(db, e["document"], e["headers"], e["data"])
        await sql(db, "unpark", e["ord"])

async def session(db, nc):  # claims partitions, and reads for them until the shares change
    info = await ask(nc, "INFO")
    first, end = info["state"]["first_seq"], info["state"]["last_seq"]
    # One that is deleted later does not begin anew by itself.
    begun or begun.extend(await sql(db, "start", STREAM, info["created"], [">"], KEYING, PARTITIONS))
    marks = [m for m in await sql(db, "claim", INSTANCE, KEYING, LEASE) if m["source"] == "live"]
    start, until = min((m["seq"] for m in marks), default=0), (marks[0]["barrier"] or 1 << 63) if marks else 0
    if start >= until: return await asyncio.sleep(0.2)  # others have all partitions, or must come to the barrier
    if start + 1 < first: sys.exit(f"messages from {start + 1} were removed unread")
    for m in marks:
        if max(first, 1) <= m["seq"] <= end and "error" in await ask(nc, "MSG.GET", seq=m["seq"]):
            await sql(db, "lost", m["partition"], m["epoch"], m["seq"])  # take refuses what comes then
    sub = await nc.jetstream().subscribe(">", stream=STREAM, ordered_consumer=True, config=nats.js.api.ConsumerConfig(
        deliver_policy=nats.js.api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start + 1))
    seq, head, tidied, more = 0, "", 0.0, True
    while more:
        try: m = await sub.next_msg(timeout=1)
        except nats.errors.TimeoutError: m = None
        more = not stopping.is_set() and not (m and m.metadata.sequence.stream > until)
        if m and more and "Outflow-Cut" not in (m.headers or {}):  # a cut is no event
            document, seq, head = document_of(m.subject), m.metadata.sequence.stream, m.headers["Outflow"]
            mark = next((o for o in marks if o["partition"] == hash_of(document) % o["partitions"]), None)
            if mark and mark["seq"] < seq and "Outflow-Dead-Letter" not in m.headers:
                await attempt(db, functools.partial(apply, db, mark, m, seq, document))
                mark["seq"] = seq
        if more and time.monotonic() < tidied + 0.5: continue
        tidied, more = time.monotonic(), more and not (await sql(db, "renew", INSTANCE, LEASE))[0]["renew"]
        if (await ask(nc, "INFO"))["created"] != info["created"]: raise RuntimeError("the stream was made anew")
        for mark in marks:
            await attempt(db, functools.partial(release, db, mark))
            if mark["seq"] < seq:  # nothing was for this partition
                await sql(db, "advance", mark["partition"], mark["epoch"], mark["seq"], seq, head)
                mark["seq"] = seq

async def main():
    for s in (signal.SIGTERM, signal.SIGINT): asyncio.get_running_loop().add_signal_handler(s, stopping.set)
    nc = await nats.connect(os.environ["NATS_URL"], max_reconnect_attempts=-1)
    while not stopping.is_set():
        try:
            async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True,
                    row_factory=psycopg.rows.dict_row, connect_timeout=5) as db:
                while not stopping.is_set(): await session(db, nc)
                await sql(db, "leave", INSTANCE)
        except Exception as e:
            print(e, file=sys.stderr)
            if getattr(e, "sqlstate", "") in ("OF003", "OF004"): sys.exit(1)  # a person has to decide
            await asyncio.sleep(0.5)  # another session finds out what has happened

asyncio.run(main())
