package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/jsapi"
)

// The kinds of target.
const (
	toStdout   = "stdout"
	toSubject  = "subject"
	toStream   = "stream"
	toConsumer = "consumer"
)

// target is where events are replayed to.
type target struct {
	kind string
	name string
	live []string // the subjects that the live stream takes and that it publishes

	stream jetstream.Stream // nil: standard output, or a dry run for a stream that does not exist
	prefix string           // goes before the original subject, with its dot; "" if all go to single
	single string           // the one subject
}

// parseTarget reads --to.
func parseTarget(text string) (*target, error) {
	if text == "" || text == toStdout {
		return &target{kind: toStdout}, nil
	}
	kind, name, _ := strings.Cut(text, ":")
	switch kind {
	case toSubject, toStream, toConsumer:
		if name != "" {
			return &target{kind: kind, name: name}, nil
		}
	}
	return nil, usage("replay_to", fmt.Sprintf("--to %q", text),
		"Write stdout, subject:SUBJECT, stream:STREAM or consumer:NAME")
}

// replayStream is the name of the stream from which the consumers of a stream read what is replayed for them.
func replayStream(stream string) string { return stream + "_replay" }

// replayPrefix is the prefix of the subjects in that stream; consumer and original subject follow.
func replayPrefix(stream string) string { return "_outflow_replay." + stream + "." }

// otherPrefix is the prefix of the subjects of a stream that replay makes.
const otherPrefix = "replay."

// filter matches every subject that goes to the target.
func (t *target) filter() string {
	if t.single != "" {
		return t.single
	}
	return t.prefix + ">"
}

// subject is the subject that a message with this original subject gets.
func (t *target) subject(original string) string {
	if t.single != "" {
		return t.single
	}
	return t.prefix + original
}

// maxAge is how long the stream keeps what is replayed to a consumer.
const maxAge = 7 * 24 * time.Hour

// resolve finds the stream that takes the messages, or makes it, and refuses one where they would be among
// the live events.
func (t *target) resolve(ctx context.Context, api *jsapi.Client, js jetstream.JetStream, cfg config.Config,
	dryRun bool) error {
	var err error
	switch t.kind {
	case toStdout:
		return nil
	case toSubject:
		err = t.resolveSubject(ctx, api, js, cfg)
	case toStream:
		err = t.resolveStream(ctx, js, cfg, dryRun)
	case toConsumer:
		t.prefix = replayPrefix(cfg.Stream) + t.name + "."
		err = t.ensure(ctx, js, cfg, replayStream(cfg.Stream), replayPrefix(cfg.Stream)+">", maxAge, dryRun)
	}
	if err == nil && t.kind != toConsumer {
		err = t.refuseLive(cfg)
	}
	return err
}

func (t *target) resolveSubject(ctx context.Context, api *jsapi.Client, js jetstream.JetStream,
	cfg config.Config) error {
	if err := checkFilter(t.name); err != nil || strings.Contains(t.name, "*") {
		return usage("replay_to", fmt.Sprintf("--to subject:%s: not a subject", t.name),
			"Write a subject, or one that ends in .> : the original subject takes the place of the >")
	}
	if prefix, ok := strings.CutSuffix(t.name, ">"); ok {
		t.prefix = prefix
	} else {
		t.single = t.name
	}
	if err := t.refuseLive(cfg); err != nil {
		return err
	}
	names, err := api.Streams(ctx, t.filter())
	if err != nil {
		return fmt.Errorf("look for the stream of subject %s: %w", t.filter(), err)
	}
	switch len(names) {
	case 1:
	case 0:
		return fatal("replay_target", fmt.Sprintf("--to subject:%s: no stream takes it", t.name),
			"Replay to stream:NAME: it is made if there is none")
	default:
		return fatal("replay_target", fmt.Sprintf("--to subject:%s: more than one stream takes it: %s",
			t.name, strings.Join(names, ", ")),
			"Name a subject that only one of them takes, or replay to stream:NAME")
	}
	st, err := js.Stream(ctx, names[0])
	if err != nil {
		return fmt.Errorf("stream %s: %w", names[0], err)
	}
	t.stream = st
	if !slices.ContainsFunc(st.CachedInfo().Config.Subjects, func(f string) bool {
		return covers(f, t.filter())
	}) {
		return fatal("replay_target", fmt.Sprintf("--to subject:%s: stream %s takes only a part of it, %v",
			t.name, names[0], st.CachedInfo().Config.Subjects),
			"Name a subject that the stream takes as a whole")
	}
	return nil
}

func (t *target) resolveStream(ctx context.Context, js jetstream.JetStream, cfg config.Config,
	dryRun bool) error {
	switch {
	case t.name == cfg.Stream:
		return t.isLive(fmt.Sprintf("stream %s is the live one", t.name))
	case t.name == replayStream(cfg.Stream):
		return usage("replay_to", fmt.Sprintf("--to stream:%s: consumers read there what is replayed to them",
			t.name), "Write --to consumer:NAME")
	case strings.HasPrefix(t.name, "KV_"), strings.HasPrefix(t.name, "OBJ_"):
		return usage("replay_to", fmt.Sprintf("--to stream:%s: that is a bucket", t.name),
			"Name another stream; it is made if there is none")
	}
	t.prefix = otherPrefix + t.name + "."
	if err := t.ensure(ctx, js, cfg, t.name, t.prefix+">", 0, dryRun); err != nil || t.stream == nil {
		return err
	}
	for _, subject := range t.stream.CachedInfo().Config.Subjects {
		if prefix, ok := strings.CutSuffix(subject, ">"); ok && prefix != "" &&
			!strings.Contains(prefix, "*") {
			t.prefix = prefix
			return nil
		}
	}
	return fatal("replay_target", fmt.Sprintf("stream %s has the subjects %v: none of them ends in .> , "+
		"where the original subject could stand", t.name, t.stream.CachedInfo().Config.Subjects),
		"Write --to subject:SUBJECT, or name a stream that is not there: it is made")
}

// ensure finds a stream, or makes it with one subject.
func (t *target) ensure(ctx context.Context, js jetstream.JetStream, cfg config.Config, name, subject string,
	age time.Duration, dryRun bool) error {
	st, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if dryRun {
			return nil
		}
		sc := jetstream.StreamConfig{
			Name: name, Subjects: []string{subject}, Storage: jetstream.FileStorage,
			Retention: jetstream.LimitsPolicy, MaxAge: age,
			Replicas: cfg.Init.Replicas, AllowDirect: true,
		}
		if t.kind == toStream {
			if err := t.refuseLive(cfg); err != nil {
				return err
			}
		}
		if st, err = js.CreateStream(ctx, sc); errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			st, err = js.Stream(ctx, name)
		}
	}
	if errors.Is(err, jetstream.ErrInvalidStreamName) {
		return usage("replay_to", fmt.Sprintf("%q is no name of a stream", name),
			"Use letters, digits, _ and -")
	}
	if err != nil {
		return fmt.Errorf("stream %s: %w", name, err)
	}
	t.stream = st
	if t.kind == toConsumer {
		sc := st.CachedInfo().Config
		if !slices.ContainsFunc(sc.Subjects, func(f string) bool { return covers(f, subject) }) ||
			sc.SubjectTransform != nil || sc.Retention != jetstream.LimitsPolicy {
			return fatal("replay_target", fmt.Sprintf("stream %s is not one that outflow replay made: its "+
				"subjects are %v", name, sc.Subjects),
				fmt.Sprintf("Its only subject is %s, its retention limits, without a transform: set it so, "+
					"or remove it", subject))
		}
	}
	return nil
}

// refuseLive refuses a target whose messages could be mistaken for live events.
func (t *target) refuseLive(cfg config.Config) error {
	f := t.filter()
	for _, reserved := range []string{"_outflow.>", "_INBOX.>", "$JS.>", "$KV.>", "$SYS.>", "$O.>"} {
		if overlap(reserved, f) {
			return t.isLive(fmt.Sprintf("%s belongs to outflow or to NATS itself (%s)", f, reserved))
		}
	}
	if f == ">" || strings.HasPrefix(f, "$") {
		return t.isLive(fmt.Sprintf("%s belongs to NATS itself", f))
	}
	subjects := []string{f}
	if t.stream != nil {
		sc := t.stream.CachedInfo().Config
		switch {
		case sc.Name == cfg.Stream:
			return t.isLive(fmt.Sprintf("%s goes into stream %s, which is the live one", f, sc.Name))
		case strings.HasPrefix(sc.Name, "KV_"):
			return t.isLive(fmt.Sprintf("%s goes into bucket %s", f, sc.Name))
		}
		if sc.SubjectTransform != nil {
			subjects = append(subjects, transformed(sc.SubjectTransform.Destination))
		}
		if sc.RePublish != nil {
			subjects = append(subjects, transformed(sc.RePublish.Destination))
		}
	}
	for _, s := range subjects {
		for _, l := range t.live {
			if overlap(s, l) {
				return t.isLive(fmt.Sprintf("%s could be one of the live subjects %s", s, l))
			}
		}
	}
	return nil
}

// transformed is a filter for the subjects that a transform's destination makes. A function that splits a
// token makes any number of tokens.
func transformed(destination string) string {
	var tokens []string
	for rest := destination; rest != ""; {
		token, after, _ := strings.Cut(rest, ".")
		if i := strings.Index(token, "{{"); i >= 0 { // there may be dots between braces
			end := strings.Index(rest, "}}")
			if end < 0 {
				return strings.Join(append(tokens, ">"), ".")
			}
			var behind string
			behind, after, _ = strings.Cut(rest[end:], ".")
			token = rest[:end] + behind
			if name := strings.ToLower(token[i:]); strings.Contains(name, "split") ||
				strings.Contains(name, "slice") {
				return strings.Join(append(tokens, ">"), ".")
			}
		}
		if rest = after; strings.ContainsAny(token, "{$") {
			token = "*"
		}
		tokens = append(tokens, token)
	}
	return strings.Join(tokens, ".")
}

func (t *target) isLive(what string) error {
	return usage("replay_live", fmt.Sprintf("--to %s:%s: %s: a replay never goes among the live events",
		t.kind, t.name, what), "Name another subject or stream; --to stream:NAME makes one that is not there")
}
