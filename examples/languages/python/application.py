"""The application: which document an event belongs to, and what it does.

Here it is a hash over each document's events in their order.
"""
import re
from urllib.parse import unquote

KEYING = "outbox.{doc_id}"  # names what document_of does: the marks count for it alone


def document_of(subject):
    """The document of the subject template outbox.{doc_id}: docs/format.md has the encoding."""
    token = subject.split(".")[1]
    if token == "=":
        return ""
    return token if "=~" in token else unquote(token.replace("=", "%"))  # =~: it was cut


async def handle(db, document, headers, data):
    """Has an event's effects, in the transaction that moves the mark. After an error it is tried again, then parked."""
    key = re.search(r" key=(\S*)", headers["Outflow"][0]).group(1)
    await db.execute("""INSERT INTO state VALUES (%s, 1, md5(%s)) ON CONFLICT (document)
        DO UPDATE SET events = state.events + 1, hash = md5(state.hash || %s)""",
                     (document, key + data.decode(), key + data.decode()))
