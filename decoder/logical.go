package decoder

import (
	"fmt"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

// maxSettings is more than the content of a well-formed change of settings takes, in bytes. What is longer is
// not quoted in full.
const maxSettings = 1024

var errSettingsLength = fmt.Errorf("settings message of more than %d bytes", maxSettings)

// logical reads what pg_logical_emit_message wrote. All messages of the database arrive; only transactional
// ones with our prefixes can be inputs, and whether they are is known at the commit.
func (d *Decoder) logical(m *reader, r *Result) error {
	const transactional = 1
	flags := m.u8()
	m.u64() // LSN of the message
	prefix := m.text()
	size := m.u32()
	start := m.skip(size)
	if err := d.end(m); err != nil {
		return err
	}
	switch {
	case flags&^transactional != 0:
		return d.protocol(m, "unknown flags %#x", flags)
	case flags&transactional == 0: // sent when it was written, not when anything was committed
		if string(prefix) == outbox.EventPrefix {
			r.Ignored = IgnoredOutside
		}
		return nil
	case !d.inCommit:
		return d.protocol(m, "transactional, but outside of a transaction")
	case d.tx.foreign, d.cfg.Mapping.Control != "": // the latter: rows say it, which are replicated
		return nil
	}
	switch string(prefix) {
	case relay.HeartbeatPrefix:
		d.tx.tick = true
	case relay.SettingsPrefix:
		r.Malformed = d.settings(m.b[start:])
	case outbox.EventPrefix:
		if d.cfg.Mapping.Source.Messages() {
			return d.event(m.b[start:], r)
		}
		r.Ignored = IgnoredMessage
	}
	return nil
}

// settings takes note of a change for this slot. The result is not nil if the content can't be read as a
// change and may have been meant for this slot.
func (d *Decoder) settings(content []byte) (malformed error) {
	slot, s, err := relay.ParseSettings(string(content[:min(len(content), maxSettings)]))
	switch {
	case slot != "" && slot != d.cfg.Slot && d.cfg.Mapping.Control == "": // a row says of which outbox it is
		return nil
	case err != nil:
		return err
	case len(content) > maxSettings:
		return errSettingsLength
	}
	d.tx.settings = &s
	return nil
}
