// The application: which document an event belongs to, and what it does. Here it is a hash over each document's
// events in their order.
import type { ClientBase } from "pg";

/** Names what documentOf does: the marks count for it alone. Package consumer takes the template for it. */
export const keying = "outbox.{doc_id}";

/** The document of the subject template outbox.{doc_id}: docs/format.md has the encoding. */
export function documentOf(subject: string) {
  const token = subject.split(".")[1];
  if (token === "=") return "";
  return token.includes("=~") ? token : decodeURIComponent(token.replaceAll("=", "%")); // =~: it was cut
}

/** Has an event's effects, in the transaction that moves the mark. After an error it is tried again, then parked. */
export async function handle(db: ClientBase, document: string, headers: Record<string, string[]>, data: Uint8Array) {
  const key = / key=(\S*)/.exec(headers.Outflow[0])![1];
  await db.query(`INSERT INTO state VALUES ($1, 1, md5($2)) ON CONFLICT (document)
    DO UPDATE SET events = state.events + 1, hash = md5(state.hash || $2)`, [document, key + Buffer.from(data)]);
}
