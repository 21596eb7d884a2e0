package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
)

// Schema converts payloads of older versions to the current one, so that a handler knows only that. A payload
// of an unknown version, or one that an upcaster refuses, is poison at once: another attempt would not help.
//
//	&consumer.Schema{
//		Current: "3",
//		From:    consumer.HeaderVersion("schema_version"),
//		Missing: "1", // of payloads written before there were versions
//		Up: map[string]consumer.Up{
//			"1": {To: "2", Do: addCurrency},
//			"2": {To: "3", Do: splitName},
//		},
//	}
//
// It must not be changed after it was given to New.
type Schema struct {
	Current string        // the version that the handler knows
	From    VersionOf     // finds the version of a message
	Missing string        // the version of a message that names none; empty: such a message is poison
	Up      map[string]Up // the upcaster of each older version
}

// VersionOf finds the version of a payload; "" if it names none.
type VersionOf func(h nats.Header, data []byte) (string, error)

// Up is an upcaster, the step from one version to a later one. Do returns the converted payload, which must
// depend only on its argument, so that the same event always becomes the same bytes.
type Up struct {
	To string
	Do func(data []byte) ([]byte, error)
}

// HeaderVersion finds the version in a mapped header (outflow's setting headers).
func HeaderVersion(name string) VersionOf {
	return func(h nats.Header, _ []byte) (string, error) {
		values := h[name]
		if len(values) == 0 {
			return "", nil
		}
		return values[0], nil
	}
}

// FieldVersion finds the version in a field of the payload, which is a JSON object. A number is taken as it
// is written: 2 is version "2".
func FieldVersion(name string) VersionOf {
	return func(_ nats.Header, data []byte) (string, error) {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(data, &fields); err != nil {
			return "", fmt.Errorf("field %s: the payload is no JSON object: %w", name, err)
		}
		raw := string(fields[name])
		switch {
		case raw == "" || raw == "null":
			return "", nil
		case raw[0] == '"':
			var s string
			err := json.Unmarshal([]byte(raw), &s)
			return s, err
		case raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9':
			return raw, nil
		}
		return "", fmt.Errorf("field %s is %.40s, neither a text nor a number", name, raw)
	}
}

// ErrUnknownVersion is the error of an event whose payload has a version that [Schema] does not know.
var ErrUnknownVersion = errors.New("unknown version of the payload")

// Check returns an error unless every version leads to the current one. New calls it.
func (s *Schema) Check() error {
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("Config.Schema: %s", fmt.Sprintf(format, args...))
	}
	switch {
	case s.Current == "":
		return wrong("Current is empty. Name the version that the handler knows")
	case s.From == nil:
		return wrong("From is nil. Say where the version is: HeaderVersion or FieldVersion")
	case s.Missing != "" && !s.knows(s.Missing):
		return wrong("Missing is %q, which is neither Current nor in Up. Known are %s", s.Missing, s.known())
	}
	if _, ok := s.Up[s.Current]; ok {
		return wrong("Up has version %q, which is Current. Set Current to the version that it leads to",
			s.Current)
	}
	for _, version := range slices.Sorted(maps.Keys(s.Up)) {
		path := []string{version}
		for v := version; v != s.Current; {
			up := s.Up[v]
			switch {
			case up.Do == nil:
				return wrong("version %q has no function Do", v)
			case !s.knows(up.To):
				return wrong("version %q leads to %q, which is neither Current (%q) nor in Up. Add the "+
					"missing step", v, up.To, s.Current)
			case slices.Contains(path, up.To):
				return wrong("version %q leads back to %q. Each step must lead to a later version",
					strings.Join(path, " to "), up.To)
			}
			v = up.To
			path = append(path, v)
		}
	}
	return nil
}

func (s *Schema) knows(version string) bool {
	_, ok := s.Up[version]
	return ok || version == s.Current
}

// known lists the versions for an error message.
func (s *Schema) known() string {
	return strings.Join(append(slices.Sorted(maps.Keys(s.Up)), s.Current), ", ")
}

// Upcast converts a payload to the current version, as is done for each event. It is for tests, as in
// consumertest.Golden.
func (s *Schema) Upcast(version string, data []byte) ([]byte, error) {
	if version != s.Current {
		// an upcaster may modify its argument; the next attempt needs the original
		data = bytes.Clone(data)
	}
	for version != s.Current {
		up, ok := s.Up[version]
		if !ok {
			return nil, fmt.Errorf("%w: %q. Known are %s; add an upcaster to Config.Schema.Up",
				ErrUnknownVersion, version, s.known())
		}
		var err error
		if data, err = up.apply(data); err != nil {
			return nil, fmt.Errorf("upcaster from version %q to %q: %w", version, up.To, err)
		}
		version = up.To
	}
	return data, nil
}

func (u Up) apply(data []byte) (_ []byte, err error) {
	defer recovered(&err)
	return u.Do(data)
}

// before is a handler with the upcasters before it. The event that it is given stays as it is: middleware may
// call it again.
func (s *Schema) before(h Handler) Handler {
	if s == nil {
		return h
	}
	return func(ctx context.Context, tx pgx.Tx, e *Event) error {
		own := *e
		if err := s.upcast(&own); err != nil {
			return err
		}
		return h(ctx, tx, &own)
	}
}

// upcast converts Data. Its error is poison. A dead letter has no payload and stays as it is.
func (s *Schema) upcast(e *Event) error {
	if s == nil || e.DeadLetter != "" {
		return nil
	}
	version, err := s.version(e)
	if err != nil {
		return Poison(err)
	}
	if version == "" {
		if s.Missing == "" {
			return Poison(fmt.Errorf("%w: the message names none, and Config.Schema.Missing is empty",
				ErrUnknownVersion))
		}
		version = s.Missing
	}
	if version != s.Current {
		data, err := s.Upcast(version, e.Data)
		if err != nil {
			return Poison(err)
		}
		e.Data = data
	}
	e.Schema = s.Current
	return nil
}

func (s *Schema) version(e *Event) (version string, err error) {
	defer recovered(&err)
	return s.From(e.Header, e.Data)
}
