package relay

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outflowhq/outflow/outbox"
)

// Prefixes of the logical messages that are inputs beside [outbox.EventPrefix].
const (
	HeartbeatPrefix = "outflow.tick"
	SettingsPrefix  = "outflow.settings"
)

// Settings are the ordering settings. With the WAL they decide the order, so changes of them are in the WAL.
// They are comparable with ==.
type Settings struct {
	Horizon   time.Duration // whole microseconds, 0 or more; 0: every transaction is its own window
	Sort      outbox.Sort
	MaxEvents int   // held events, at least 1
	MaxBytes  int64 // held bytes by [Event.Size], at least 1
}

// The maxima: of the configuration, and of a change in the WAL, which anyone may have written who may write
// logical messages. They limit what such a change can make Outflow hold in memory.
const (
	MaxHorizon   = 24 * time.Hour
	MaxMaxEvents = 4 << 20
	MaxMaxBytes  = 1 << 30
)

// The defaults.
const (
	DefaultHorizon   = 20 * time.Millisecond
	DefaultMaxEvents = 65536
	DefaultMaxBytes  = 64 << 20
)

// Validate names the first setting that is out of its range.
func (s Settings) Validate() error {
	switch {
	case s.MaxEvents > MaxMaxEvents:
		return fmt.Errorf("max_events %d: want %d or less", s.MaxEvents, MaxMaxEvents)
	case s.MaxBytes > MaxMaxBytes:
		return fmt.Errorf("max_bytes %d: want %d or less", s.MaxBytes, MaxMaxBytes)
	}
	return s.Sound()
}

// Sound is Validate without the maxima of the limits: a record of an Outflow that had none may hold more.
func (s Settings) Sound() error {
	switch {
	case s.Horizon < 0 || s.Horizon > MaxHorizon:
		return fmt.Errorf("horizon %v: want 0s to 24h", s.Horizon)
	case s.Horizon%time.Microsecond != 0:
		return fmt.Errorf("horizon %v: want whole microseconds", s.Horizon)
	case s.Sort > outbox.ByCommit:
		return fmt.Errorf("sort %d: unknown", s.Sort)
	case s.MaxEvents < 1:
		return fmt.Errorf("max_events %d: want 1 or more", s.MaxEvents)
	case s.MaxBytes < 1:
		return fmt.Errorf("max_bytes %d: want 1 or more", s.MaxBytes)
	}
	return nil
}

// String is the text form without the slot, for logs.
func (s Settings) String() string {
	return fmt.Sprintf("horizon=%v sort=%v max_events=%d max_bytes=%d", s.Horizon, s.Sort, s.MaxEvents,
		s.MaxBytes)
}

// Content is the content of the logical message that changes the settings of a slot's outflow.
func (s Settings) Content(slot string) string { return "v=1 slot=" + slot + " " + s.String() }

// ParseSettings reads the content of a settings message: each key once, in the order that [Settings.Content]
// writes. The slot is returned as soon as it is known, so that a caller can pass over what is meant for
// others. An error means that it is malformed or of a version that is not known: nobody can tell whether a
// newer Outflow wrote that or a stranger, so it must not have an effect.
func ParseSettings(content string) (slot string, s Settings, err error) {
	version, rest, _ := strings.Cut(content, " ")
	v, ok := strings.CutPrefix(version, "v=")
	n, numErr := strconv.ParseUint(v, 10, 32)
	if !ok || numErr != nil || n == 0 {
		return "", s, fmt.Errorf("settings message %q: no version", content)
	}
	first, rest, _ := strings.Cut(rest, " ")
	slot, ok = strings.CutPrefix(first, "slot=")
	if !ok || slot == "" {
		return "", s, fmt.Errorf("settings message %q: no slot", content)
	}
	if n > 1 {
		return slot, s, fmt.Errorf("settings message %q: version %d is not known", content, n)
	}
	for _, key := range []string{"horizon=", "sort=", "max_events=", "max_bytes="} {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		value, ok := strings.CutPrefix(field, key)
		if !ok {
			return slot, Settings{}, fmt.Errorf("settings message %q: want %s next", content, key)
		}
		switch key {
		case "horizon=":
			s.Horizon, err = time.ParseDuration(value)
		case "sort=":
			s.Sort, err = outbox.ParseSort(value)
		case "max_events=":
			s.MaxEvents, err = strconv.Atoi(value)
		case "max_bytes=":
			s.MaxBytes, err = strconv.ParseInt(value, 10, 64)
		}
		if err != nil {
			return slot, Settings{}, fmt.Errorf("settings message %q: %w", content, err)
		}
	}
	if rest != "" {
		return slot, Settings{}, fmt.Errorf("settings message %q: %q after the end", content, rest)
	}
	if err := s.Validate(); err != nil {
		return slot, Settings{}, fmt.Errorf("settings message %q: %w", content, err)
	}
	return slot, s, nil
}

// Unkeyed returns the settings in force where the table has neither a key nor the columns to make one from:
// commit order.
func (s Settings) Unkeyed() Settings {
	s.Horizon, s.Sort = 0, outbox.ByCommit
	return s
}

type settingsJSON struct {
	Horizon   string      `json:"horizon"`
	Sort      outbox.Sort `json:"sort"`
	MaxEvents int         `json:"max_events"`
	MaxBytes  int64       `json:"max_bytes"`
}

// MarshalJSON writes the horizon as text, as in the configuration.
func (s Settings) MarshalJSON() ([]byte, error) {
	return json.Marshal(settingsJSON{s.Horizon.String(), s.Sort, s.MaxEvents, s.MaxBytes})
}

// UnmarshalJSON reads what MarshalJSON writes, and checks that it is sound.
func (s *Settings) UnmarshalJSON(b []byte) error {
	var j settingsJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	h, err := time.ParseDuration(j.Horizon)
	if err != nil {
		return err
	}
	*s = Settings{Horizon: h, Sort: j.Sort, MaxEvents: j.MaxEvents, MaxBytes: j.MaxBytes}
	return s.Sound()
}
