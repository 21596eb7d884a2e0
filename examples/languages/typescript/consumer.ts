// A complete consumer: each event has its effect once and in order, through any crash, and any number of
// instances share the work. docs/consume-any-language.md explains each step.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { DeliverPolicy, jetstream, jetstreamManager, type JsMsg } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";
import pg from "pg";
import { documentOf, handle, keying } from "./application.js";

const { NAME = "notes", STREAM = "OUTBOX", LEASE = "10 s", PARTITIONS = 16, INSTANCE = randomUUID() } = process.env;
pg.types.setTypeParser(pg.types.builtins.INT8, Number);
const nc = await connect({ servers: process.env.NATS_URL, maxReconnectAttempts: -1, waitOnFirstConnect: true });
const jsm = await jetstreamManager(nc), info = () => jsm.streams.info(STREAM);
let db: pg.Client, stopping = false, begun = false, due = 0;
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => { stopping = true; });
const sql = async (text: string, ...args: unknown[]) => (await db.query(text, [NAME, ...args])).rows;
const hash = (s: string) => Buffer.from(s).reduce((h, b) => Math.imul(h ^ b, 16777619) >>> 0, 2166136261);
const renewal = async () => Date.now() > due && (due = Date.now() + 500, // true: the shares have changed
  (await sql("SELECT outflow.renew($1, $2, $3) AS changed", INSTANCE, LEASE))[0].changed);

// attempt commits the work, again and again as long as the handler fails: for good after 5 times where the database
// refuses the data, and after a quarter of an hour otherwise, as what it needs may be down.
async function attempt(work: (tries: number, failure: string, forGood: boolean) => Promise<unknown>) {
  for (let tries = 0, e: any = { failure: "" }; e; tries++) {
    await db.query("BEGIN");
    e = await work(tries, e.failure, tries >= (e.refused ? 5 : 900)).then(() => null, (e) => e);
    if (e && !e.failure) throw e;
    await db.query(e ? "ROLLBACK" : "COMMIT");
    if (e) await sleep(Math.min(50 * 2 ** tries, 1000));
    if (e && (stopping || await renewal())) throw new Error(`it claims again while an event fails: ${e.failure}`);
  }
}
const failed = (e: any) => { throw { failure: String(e), refused: /^2[23]/.test(e?.code) }; };

async function session() { // claims partitions, and reads for them until the shares change
  const { created, state } = await info();
  // One that is deleted later does not begin anew by itself.
  begun ||= !!await sql("SELECT outflow.start($1, $2, $3, '{>}', $4, $5)", STREAM, created, keying, PARTITIONS);
  const marks = (await sql("SELECT * FROM outflow.claim($1, $2, $3, $4)", INSTANCE, keying, LEASE))
    .filter((m) => m.source === "live"); // a replay needs an instance in Go
  const from = Math.min(...marks.map((m) => m.seq)), until = marks[0]?.barrier ?? Infinity;
  if (from >= until) return sleep(200); // others have all partitions, or have to come to the barrier
  if (from + 1 < state.first_seq) throw { code: "OF004", message: `messages from ${from + 1} were removed unread` };
  for (const { partition, epoch, seq } of marks.filter((m) => m.seq > 0 && m.seq <= state.last_seq))
    if (seq >= state.first_seq && !await jsm.streams.getMessage(STREAM, { seq }))
      await sql("SELECT outflow.lost($1, $2, $3, $4)", partition, epoch, seq); // take refuses what comes then
  const reader = await jetstream(nc).consumers.get(STREAM,
    { deliver_policy: DeliverPolicy.StartSequence, opt_start_seq: from + 1 });
  for (let last: JsMsg | undefined, more = true; more; more &&= !stopping && !await renewal()) {
    for await (const m of await reader.fetch({ max_messages: 200, expires: 1000 })) {
      if (!(more = m.seq <= until && !stopping && !await renewal())) break;
      if (m.headers?.has("Outflow-Cut")) continue; // no event
      const document = documentOf(m.subject), p = hash(document) % marks[0].partitions;
      const mark = marks.find((m) => m.partition === p), headers = Object.fromEntries((last = m).headers!);
      if (!mark || m.seq <= mark.seq || headers["Outflow-Dead-Letter"]) continue;
      await attempt(async (tries, failure, forGood) => {
        const [{ take }] = await sql("SELECT outflow.take($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
          mark.partition, mark.epoch, mark.seq, m.seq, document, m.subject, headers, m.data, m.time,
          forGood ? failure : null, tries); // with why it has failed for good it is parked
        if (take) await handle(db, document, headers, m.data).catch(failed);
      }).then(() => mark.seq = m.seq);
    }
    for (const m of marks) {
      for (let e: any = {}; e;) await attempt(async (tries, failure) => { // parked, and released by an operator
        [e] = await sql("SELECT * FROM outflow.released($1, $2, $3, $4)", m.partition, m.epoch, m.seq);
        if (tries) return sql("SELECT outflow.repark($1, $2, $3, $4)", e.ord, failure, e.attempts + 1);
        if (e && !e.skip) await handle(db, e.document, e.headers, e.data).catch(failed);
        if (e) await sql("SELECT outflow.unpark($1, $2)", e.ord);
      });
      if (last && m.seq < last.seq) // nothing was for this partition
        await sql("SELECT outflow.advance($1, $2, $3, $4, $5, $6)", m.partition, m.epoch, m.seq, m.seq = last.seq,
          last.headers!.get("Outflow"));
    }
    if ((await info()).created !== created) throw new Error("the stream was made anew");
  }
}

for (; !stopping; await sleep(500)) {
  db = new pg.Client({ connectionString: process.env.DATABASE_URL, connectionTimeoutMillis: 5000 }).on("error", () => {});
  try { for (await db.connect(); !stopping;) await session(); } catch (e: any) {
    console.error(e.message);
    if (["OF003", "OF004"].includes(e.code)) process.exitCode = 1, stopping = true; // a person has to decide
  } finally { // others take the partitions; another session finds out what has happened
    await db.query("ROLLBACK").then(() => sql("SELECT outflow.leave($1, $2)", INSTANCE)).catch(() => {});
    await db.end();
  }
}
await nc.close();
