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

// ControlColumns are the columns of the control table that are read: which outbox (schema.name) a row is for,
// and what would be the prefix and the content of a logical message.
var ControlColumns = [...]string{"outbox", "prefix", "content"}

// Settings are the ordering settings. With the WAL they decide the order, so changes of them are in the WAL.
// They are comparable with ==.
type Settings struct {
	Horizon   time.Duration // whole microseconds, 0 or more; 0: every transaction is its own window
	Sort      outbox.Sort   // outbox.ByGap: gap mode, and Horizon is 0
	MaxEvents int           // held events, at least 1
	MaxBytes  int64         // held bytes by [Event.Size], at least 1
	Gap       Gap           // the zero value where Sort is another
}

// Gap has the settings of gap mode.
type Gap struct {
	// how long an event waits for a missing counter, by commit timestamps; whole microseconds
	Bound time.Duration
	// how long an event waits whose sequence is not remembered, so that nobody knows what is missing before
	// it; whole microseconds, at most Bound
	Cold time.Duration
	// how many of the newest messages of the stream are remembered: the last counters of their sequences
	Memory int
	First  int64 // the first counter of a sequence
	Scope  Scope // what waits behind a missing counter
}

// Scope says what waits behind a missing counter.
type Scope uint8

// The scopes.
const (
	OfSequence Scope = iota // what follows in the same sequence
	OfDocument              // whatever is committed later in the same document
)

// ParseScope reads "sequence" or "document".
func ParseScope(s string) (Scope, error) {
	switch s {
	case "sequence":
		return OfSequence, nil
	case "document":
		return OfDocument, nil
	}
	return 0, fmt.Errorf("gap_scope %q: want sequence or document", s)
}

func (s Scope) String() string {
	if s == OfDocument {
		return "document"
	}
	return "sequence"
}

// MarshalText implements [encoding.TextMarshaler].
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (s *Scope) UnmarshalText(b []byte) (err error) {
	*s, err = ParseScope(string(b))
	return err
}

// The maxima: of the configuration, and of a change in the WAL, which anyone may have written who may write
// logical messages. They limit what such a change can make Outflow hold in memory.
const (
	MaxHorizon   = 24 * time.Hour
	MaxMaxEvents = 4 << 20
	MaxMaxBytes  = 1 << 30
	MaxBound     = 24 * time.Hour
	MaxMemory    = 1 << 20
)

// The defaults.
const (
	DefaultHorizon   = 20 * time.Millisecond
	DefaultMaxEvents = 65536
	DefaultMaxBytes  = 64 << 20
	DefaultBound     = 10 * time.Second
	DefaultCold      = 20 * time.Millisecond
	DefaultMemory    = 16384
	DefaultFirst     = 1
)

// Validate names the first setting that is out of its range.
func (s Settings) Validate() error {
	switch {
	case s.MaxEvents > MaxMaxEvents:
		return fmt.Errorf("max_events %d: want %d or less", s.MaxEvents, MaxMaxEvents)
	case s.MaxBytes > MaxMaxBytes:
		return fmt.Errorf("max_bytes %d: want %d or less", s.MaxBytes, MaxMaxBytes)
	case s.Gap.Memory > MaxMemory:
		return fmt.Errorf("memory %d: want %d or less", s.Gap.Memory, MaxMemory)
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
	case s.Sort > outbox.ByGap:
		return fmt.Errorf("sort %d: unknown", s.Sort)
	case s.MaxEvents < 1:
		return fmt.Errorf("max_events %d: want 1 or more", s.MaxEvents)
	case s.MaxBytes < 1:
		return fmt.Errorf("max_bytes %d: want 1 or more", s.MaxBytes)
	case s.ByGap() && s.Horizon != 0:
		return fmt.Errorf("horizon %v: want 0s in gap mode", s.Horizon)
	case s.ByGap():
		return s.Gap.sound()
	case s.Gap != Gap{}:
		return fmt.Errorf("settings of gap mode with sort %v", s.Sort)
	}
	return nil
}

// ByGap reports whether gap mode is in force.
func (s Settings) ByGap() bool { return s.Sort == outbox.ByGap }

func (g Gap) sound() error {
	switch {
	case g.Bound <= 0 || g.Bound > MaxBound:
		return fmt.Errorf("bound %v: want more than 0s, and 24h or less", g.Bound)
	case g.Bound%time.Microsecond != 0:
		return fmt.Errorf("bound %v: want whole microseconds", g.Bound)
	case g.Cold < 0 || g.Cold > g.Bound:
		return fmt.Errorf("cold %v: want 0s to bound, %v", g.Cold, g.Bound)
	case g.Cold%time.Microsecond != 0:
		return fmt.Errorf("cold %v: want whole microseconds", g.Cold)
	case g.Memory < 1:
		return fmt.Errorf("memory %d: want 1 or more", g.Memory)
	case g.First != 0 && g.First != 1:
		return fmt.Errorf("first_counter %d: want 0 or 1", g.First)
	case g.Scope > OfDocument:
		return fmt.Errorf("gap_scope %d: unknown", g.Scope)
	}
	return nil
}

// String is the text form without the slot, for logs.
func (s Settings) String() string {
	if !s.ByGap() {
		return fmt.Sprintf("horizon=%v sort=%v max_events=%d max_bytes=%d", s.Horizon, s.Sort, s.MaxEvents,
			s.MaxBytes)
	}
	return fmt.Sprintf("mode=gap bound=%v cold=%v memory=%d first_counter=%d gap_scope=%v max_events=%d "+
		"max_bytes=%d", s.Gap.Bound, s.Gap.Cold, s.Gap.Memory, s.Gap.First, s.Gap.Scope, s.MaxEvents,
		s.MaxBytes)
}

// The versions of a settings message: gap mode is not known to programs that read the first one only.
const (
	horizonVersion = 1
	gapVersion     = 2
)

// Content is the content of the logical message that changes the settings of a slot's outflow.
func (s Settings) Content(slot string) string {
	version := horizonVersion
	if s.ByGap() {
		version = gapVersion
	}
	return fmt.Sprintf("v=%d slot=%s %v", version, slot, s)
}

// The keys of a settings message, in their order.
var (
	horizonKeys = []string{"horizon=", "sort=", "max_events=", "max_bytes="}
	gapKeys     = []string{"mode=", "bound=", "cold=", "memory=", "first_counter=", "gap_scope=",
		"max_events=", "max_bytes="}
)

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
	if n > gapVersion {
		return slot, s, fmt.Errorf("settings message %q: version %d is not known", content, n)
	}
	keys := horizonKeys
	if n == gapVersion {
		keys = gapKeys
	}
	for _, key := range keys {
		var field string
		field, rest, _ = strings.Cut(rest, " ")
		value, ok := strings.CutPrefix(field, key)
		if !ok {
			return slot, Settings{}, fmt.Errorf("settings message %q: want %s next", content, key)
		}
		if err := s.parse(key, value); err != nil {
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

func (s *Settings) parse(key, value string) (err error) {
	switch key {
	case "horizon=":
		s.Horizon, err = time.ParseDuration(value)
	case "sort=":
		if s.Sort, err = outbox.ParseSort(value); s.Sort == outbox.ByGap {
			err = fmt.Errorf("sort %q: want mode=gap in version %d", value, gapVersion)
		}
	case "mode=":
		if s.Sort, err = outbox.ParseSort(value); s.Sort != outbox.ByGap {
			err = fmt.Errorf("mode %q: want gap", value)
		}
	case "bound=":
		s.Gap.Bound, err = time.ParseDuration(value)
	case "cold=":
		s.Gap.Cold, err = time.ParseDuration(value)
	case "memory=":
		s.Gap.Memory, err = strconv.Atoi(value)
	case "first_counter=":
		s.Gap.First, err = strconv.ParseInt(value, 10, 64)
	case "gap_scope=":
		s.Gap.Scope, err = ParseScope(value)
	case "max_events=":
		s.MaxEvents, err = strconv.Atoi(value)
	case "max_bytes=":
		s.MaxBytes, err = strconv.ParseInt(value, 10, 64)
	}
	return err
}

// Unkeyed returns the settings in force where the table has neither a key nor the columns to make one from:
// commit order, except in gap mode, which needs no key.
func (s Settings) Unkeyed() Settings {
	if s.ByGap() {
		return s
	}
	s.Horizon, s.Sort = 0, outbox.ByCommit
	return s
}

type settingsJSON struct {
	Horizon   string      `json:"horizon"`
	Sort      outbox.Sort `json:"sort"`
	MaxEvents int         `json:"max_events"`
	MaxBytes  int64       `json:"max_bytes"`
	Gap       *gapJSON    `json:"gap,omitempty"`
}

type gapJSON struct {
	Bound  string `json:"bound"`
	Cold   string `json:"cold"`
	Memory int    `json:"memory"`
	First  int64  `json:"first_counter"`
	Scope  Scope  `json:"gap_scope"`
}

// MarshalJSON writes durations as text, as in the configuration.
func (s Settings) MarshalJSON() ([]byte, error) {
	j := settingsJSON{s.Horizon.String(), s.Sort, s.MaxEvents, s.MaxBytes, nil}
	if s.ByGap() {
		j.Gap = &gapJSON{s.Gap.Bound.String(), s.Gap.Cold.String(), s.Gap.Memory, s.Gap.First, s.Gap.Scope}
	}
	return json.Marshal(j)
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
	if g := j.Gap; g != nil {
		s.Gap = Gap{Memory: g.Memory, First: g.First, Scope: g.Scope}
		if s.Gap.Bound, err = time.ParseDuration(g.Bound); err != nil {
			return err
		}
		if s.Gap.Cold, err = time.ParseDuration(g.Cold); err != nil {
			return err
		}
	}
	return s.Sound()
}
