package checkpoint

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// CodePublication is the code of the fault of rows that may be in no stream of changes, for what was
// published was not the same all the time.
const CodePublication = "publication_changed"

// CheckPublication compares what is published with what the record knows. end is where the WAL ended before
// it was read. Rows may be hidden between where it was last seen right and there: that is a gap, seen to
// happen, because what hid them may be gone at the next reading. What an older record does not know is taken
// as it is.
func (c Config) CheckPublication(known PublicationSeen, now relay.PublicationIdentity, end outbox.LSN) error {
	what, hint := "", ""
	entry := func(id relay.PublicationIdentity) relay.PublicationIdentity {
		return relay.PublicationIdentity{
			OID: id.OID, Xmin: id.Xmin, RelOID: id.RelOID, RelXmin: id.RelXmin, SchemaOID: id.SchemaOID,
			SchemaXmin: id.SchemaXmin,
		}
	}
	switch old := known.PublicationIdentity; {
	case now.Hidden != nil:
		what, hint = now.Hidden.Message, now.Hidden.Hint+", before the repair. "
	case old.TableOID != 0 && old.TableOID != now.TableOID:
		what = fmt.Sprintf("table %s has OID %d, the one that was published has OID %d: it was renamed or "+
			"dropped, and this one made or renamed in its place",
			c.Table, now.TableOID, old.TableOID)
		hint = "The repair says what that one is called now, and publishes the rows that it still has. "
	case entry(old) != entry(now):
		what = fmt.Sprintf("publication %s, or its entry for table %s, is not the one that the checkpoint "+
			"record knows: it was changed, or dropped and made again",
			c.Publication, c.Table)
	case old.Subscription != now.Subscription:
		which := "subscription " + c.Mapping.Subscription
		if !c.Mapping.Away() {
			which = "one of the subscriptions that bring what the other clusters say"
		}
		what = fmt.Sprintf("%s, or what it says of table %s or of %s, is not what the "+
			"checkpoint record knows: it was made again, or the table was taken out of it and put back",
			which, c.Table, c.Mapping.Control)
	case old.TableOID != 0 && old.Path != now.Path:
		what = fmt.Sprintf("table %s was taken out of what publication %s publishes, and put back: out of "+
			"its schema, or from under its parent",
			c.Table, c.Publication)
	default:
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Gap, Code: CodePublication, Observed: true, Message: what,
		Hint: c.hintOf(CodePublication, hint+c.hintPublication()),
		From: known.Seen, To: max(known.Seen, end),
	}
}
