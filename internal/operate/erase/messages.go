package erase

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/app/wiring"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink"
	"github.com/outflowhq/outflow/sink/stream"
)

// found is a message that goes.
type found struct {
	seq             uint64
	subject, header string
}

// batch is how many messages are noted as erased before they are: so many a run that is killed may leave.
const batch = 256

// asItIs is the subject of a message in the stream itself.
func asItIs(subject string, _ nats.Header) string { return subject }

// headerOf is a stored message's header.
func headerOf(m *jsapi.Message) (nats.Header, error) {
	if len(m.Header) == 0 {
		return nats.Header{}, nil
	}
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil {
		return nil, fmt.Errorf("message %d: %w", m.Seq, err)
	}
	return h, nil
}

// goes says of a message of a stream whether it goes, if it is of the document. unsure: where it lies in the
// stream of the settings is not known, and its position alone says that it stays.
type goes func(h nats.Header, seq uint64, at time.Time) (is, unsure bool)

// find reads the messages of a stream up to a sequence, and returns those of the document that go.
func (c *command) find(ctx context.Context, name string, last uint64,
	original func(subject string, h nats.Header) string, goes goes) (all []found, err error) {
	c.stays[name], c.untold[name], c.reached = nil, 0, nil
	js, err := c.l.NATS.API().JetStream()
	if err != nil || last == 0 {
		return nil, err
	}
	// The leader says up to where it is read: a replica that lags has less.
	if last, err = stream.New(c.l.NATS.API(), name, c.log).AtOrBelow(ctx, last); err != nil || last == 0 {
		return nil, err
	}
	task := progress.Count(ctx, "reading stream "+name, "messages", int64(last))
	defer task.End()
	var stays []uint64
	reached := map[[2]string]uint64{}
	err = jsapi.ReadStream(ctx, js, name, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, HeadersOnly: true,
	}, last, func(m jetstream.Msg, meta *jetstream.MsgMetadata) error {
		seq, h := meta.Sequence.Stream, m.Headers()
		if seq > last {
			return jsapi.ErrStop
		}
		task.Set(int64(seq))
		if s := sourceOf(h); s != nil {
			key := [2]string{s.from, s.filters}
			reached[key] = max(reached[key], s.seq)
		}
		header := h.Get(outbox.HeaderName)
		if header == "" {
			return nil
		}
		now, unsure := goes(h, seq, meta.Timestamp)
		if !now && !unsure {
			return nil
		}
		var data []byte
		if h.Get(sink.HeaderDeadLetter) != "" {
			full, err := c.l.NATS.API().Message(ctx, name, jsapi.MessageRequest{Seq: seq})
			if err != nil || full == nil {
				return err
			}
			data = full.Data
		}
		is, known := c.doc.Is(original(m.Subject(), h), h, data)
		if !known && now {
			c.untold[name]++
		}
		switch {
		case is && now:
			all = append(all, found{seq, m.Subject(), header})
		case is:
			stays = append(stays, seq)
		}
		return nil
	})
	c.stays[name], c.reached = stays, reached
	return all, err
}

// inStream reports whether a message of the stream goes, if it is of the document.
func (c *command) inStream(h nats.Header, seq uint64, _ time.Time) (goes, unsure bool) {
	if !micro(c.rd.Stream.Created).Equal(c.rec.Created) {
		seq = 0 // it was made anew
	}
	return c.rec.Goes(h.Get(outbox.HeaderName), seq), false
}

// mayGo is up to where messages may go, and why not further.
func (c *command) mayGo(ctx context.Context) (streamretain.Bound, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	rec, _, err := wiring.Store(c.cfg, c.l.NATS).Load(ctx)
	if err != nil {
		return streamretain.Bound{}, err
	}
	st, err := c.stream.Tail(ctx)
	if err != nil {
		return streamretain.Bound{}, err
	}
	rule := streamretain.Config{}
	if c.cfg.Reorder.Mode == config.ModeGap {
		rule.Memory = c.cfg.Reorder.Memory
	}
	facts := streamretain.Facts{Created: st.Created, Last: st.LastSeq, Newest: st.NewestSeq, Record: rec}
	if err := facts.CountCuts(ctx, c.stream); err != nil {
		return streamretain.Bound{}, err
	}
	return streamretain.Bounds(&rule, &facts)[0], nil
}

// deletable refuses to begin where a stream has messages of the document and lets nobody delete one: what is
// noted as erased, and is not, keeps the archive waiting for ever.
func (c *command) deletable(ctx context.Context) error {
	rec := c.rec
	defer func() { c.rec = rec }()
	if c.rec == nil || c.rec.Cut == 0 {
		c.rec = c.begunNow()
	}
	for _, s := range c.list {
		var all []found
		var err error
		switch {
		case s.denied == "":
		case s.name == c.cfg.Stream:
			all, err = c.find(ctx, s.name, c.rd.Stream.LastSeq, asItIs, c.inStream)
		case c.rep.copy(s.name):
			all, _, err = c.inCopy(ctx, s.name)
		}
		if err == nil && len(all) > 0 {
			err = c.denied(s.name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// denied refuses to delete from a stream that lets nobody.
func (c *command) denied(name string) error {
	s := c.info(name)
	if s == nil || s.denied == "" {
		return nil
	}
	return &outbox.Fault{Class: outbox.Fatal, Code: "erase_denied", Message: fmt.Sprintf("stream %s has "+
		"messages of the document, and %s: the server deletes none for anybody, and that can't be taken back",
		name, s.denied)}
}

// messages erases those of the stream, as far as they may go until then.
func (c *command) messages(ctx context.Context, until time.Time) error {
	// All that was committed below the cut is in the stream: its own slot has confirmed it.
	st, err := c.stream.Tail(ctx)
	if err != nil {
		return err
	}
	if !st.Created.Equal(c.rd.Stream.Created) {
		return c.madeAnew()
	}
	c.rd.Stream = st // what has gone since this began is not found any more
	left, err := c.find(ctx, c.cfg.Stream, st.LastSeq, asItIs, c.inStream)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		if err := c.denied(c.cfg.Stream); err != nil {
			return err
		}
		ok, err := c.replicas(ctx, c.cfg.Stream, until, len(c.rec.Erased) > 0)
		if err != nil || !ok {
			return err
		}
	}
	if err := c.eraseAll(ctx, left, until); err != nil || len(c.rec.Erased) == 0 {
		return err
	}
	_, err = c.replicas(ctx, c.cfg.Stream, until, true)
	return err
}

// eraseAll erases messages of the stream, as far as they may go until then.
func (c *command) eraseAll(ctx context.Context, left []found, until time.Time) error {
	task := progress.Count(ctx, "erasing from stream "+c.cfg.Stream, "messages", int64(len(left)))
	defer task.End()
	for len(left) > 0 {
		bound, err := c.mayGo(ctx)
		if err != nil {
			return err
		}
		n := 0
		for n < len(left) && n < batch && left[n].seq <= bound.UpTo {
			n++
		}
		if n > 0 {
			if err := c.eraseBatch(ctx, left[:n]); err != nil {
				return err
			}
			task.Add(int64(n))
			left = left[n:]
			continue
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("%d messages of the stream, from %d on, can't "+
				"go yet: %s", len(left), left[0].seq, bound.Why))
			return err
		}
	}
	return nil
}

// eraseBatch notes that messages are erased, and erases them. What a run that was killed has noted stays
// noted: it is of the document, and the next run erases it.
func (c *command) eraseBatch(ctx context.Context, all []found) error {
	c.rec.Erased = c.rec.Erased.With(sequences(all)...)
	if err := c.ledger.Save(ctx, c.rec); err != nil {
		return err
	}
	if err := c.note(ctx, all); err != nil {
		return err
	}
	c.o.Hit("erase.saved")
	return c.deleteNoted(ctx, all)
}

// deleteNoted deletes messages of the stream whose sequences it has noted there. A server changes a stream's
// metadata as a whole, whatever they have become since they were read. Whoever else was about to change them
// may have taken the note away, so afterwards it is looked whether it is there.
func (c *command) deleteNoted(ctx context.Context, all []found) error {
	if err := c.noteErased(ctx, all); err != nil {
		return err
	}
	c.o.Hit("erase.noted")
	for _, f := range all {
		if err := c.delete(ctx, c.cfg.Stream, f); err != nil {
			return err
		}
		c.o.Hit("erase.message")
	}
	return c.noteErased(ctx, all)
}

func (c *command) noteErased(ctx context.Context, all []found) error {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return c.stream.NoteErased(ask, sequences(all))
}

func sequences(all []found) (s outbox.Sequences) {
	for _, f := range all {
		s = s.With(outbox.SequenceRange{From: f.seq, To: f.seq})
	}
	return s
}

// note notes the ids of messages, so that their rows are known when they come back.
func (c *command) note(ctx context.Context, all []found) error {
	for some := range slices.Chunk(all, batch) {
		var headers []string
		for _, f := range some {
			headers = append(headers, f.header)
		}
		if err := c.ledger.Note(ctx, c.rec, headers); err != nil {
			return err
		}
	}
	return nil
}

// streamInfo is what is known of a stream of the account.
type streamInfo struct {
	name      string
	created   time.Time
	origins   []origin // streams of this account that it copies
	mirror    string   // the only one of them, if it mirrors that: then its sequences are that one's
	restored  string   // the folder of the archive that it was made from; "": it was not
	restoring string   // likewise, and that is under way
	replicas  int
	denied    string // the setting that lets nobody delete a message; "": none does
	live      bool   // an Outflow publishes to it, or did
	outflow   bool   // its newest message is one of Outflow, and it is not a live stream
}

// origin is a stream that another one copies, and what of it.
type origin struct {
	Name     string          `json:"name"`
	External json.RawMessage `json:"external"` // of another account or domain
	Filter   string          `json:"filter_subject"`
	Filters  []struct {
		Subject string `json:"src"`
	} `json:"subject_transforms"`
	FromSeq  uint64    `json:"opt_start_seq"`
	FromTime time.Time `json:"opt_start_time"`
}

// subjects are those that are copied.
func (o *origin) subjects() (all []string) {
	if len(o.Filters) == 0 {
		return []string{cmp.Or(o.Filter, ">")}
	}
	for _, f := range o.Filters {
		all = append(all, cmp.Or(f.Subject, ">"))
	}
	return all
}

// ours reports whether a folder of the archive is of the stream of the settings.
func (c *command) ours(folder string) bool {
	of, _, ok := archive.StreamOf(folder)
	return ok && of == c.cfg.Stream
}

// replayed is the name of the stream in which consumers find what is replayed to them.
func replayed(stream string) string { return stream + "_replay" }

// copies lists the streams of the account that have copies of the messages: those that mirror it or source
// from it, over others too, what is replayed to consumers, what was restored from the archive, and those that
// the command line names.
func (c *command) copies(ctx context.Context) error {
	if err := c.listStreams(ctx); err != nil {
		return err
	}
	is := map[string]bool{}
	for _, name := range c.o.Copies {
		if c.info(name) == nil || name == c.cfg.Stream {
			return &outbox.Fault{Class: outbox.Usage, Code: "flags",
				Message: fmt.Sprintf("--copy %q: the account has no such other stream", name)}
		}
		is[name] = true
	}
	if name := replayed(c.cfg.Stream); c.info(name) != nil {
		is[name] = true
	}
	for more := true; more; {
		more = false
		for _, s := range c.list {
			if !is[s.name] && s.name != c.cfg.Stream && (c.ours(s.restored) && !s.live ||
				slices.ContainsFunc(s.origins, func(o origin) bool {
					return o.Name == c.cfg.Stream || is[o.Name]
				})) {
				is[s.name], more = true, true
			}
		}
	}
	c.rep.Copies = []Copy{}
	for _, name := range c.inOrder(is) {
		c.rep.Copies = append(c.rep.Copies, Copy{Stream: name})
	}
	return nil
}

// restoring names the streams that are being restored, perhaps from what the archive had before it was erased
// there.
func (c *command) restoring() {
	for _, s := range c.list {
		if c.ours(s.restoring) && s.name != c.cfg.Stream {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("stream %s is being restored from the archive",
				s.name))
		}
	}
}

// inOrder puts streams behind those that they copy from: what is still in one of these may come again.
func (c *command) inOrder(is map[string]bool) (all []string) {
	left := slices.Sorted(maps.Keys(is))
	for len(left) > 0 {
		next := slices.IndexFunc(left, func(name string) bool {
			return !slices.ContainsFunc(c.info(name).origins, func(o origin) bool {
				return slices.Contains(left, o.Name)
			})
		})
		next = max(next, 0) // they copy from one another
		all = append(all, left[next])
		left = slices.Delete(left, next, next+1)
	}
	return all
}

// info is what is known of a stream; nil if there is none.
func (c *command) info(name string) *streamInfo {
	if i := slices.IndexFunc(c.list, func(s streamInfo) bool { return s.name == name }); i >= 0 {
		return &c.list[i]
	}
	return nil
}

// sequencesOf is when the stream was made whose sequences the messages of this one have: the stream of the
// settings, or one that had its name before.
func (c *command) sequencesOf(name string) (created time.Time, known bool) {
	for range len(c.list) + 1 {
		if name == c.cfg.Stream {
			return micro(c.rd.Stream.Created), true
		}
		s := c.info(name)
		if s == nil {
			return created, false
		}
		if c.ours(s.restored) {
			_, created, known = archive.StreamOf(s.restored)
			return micro(created), known
		}
		name = s.mirror
	}
	return created, false
}

// headerSource is the header in which the server says from which stream, and from where in it, a message of a
// stream with sources is.
const headerSource = "Nats-Stream-Source"

// inCopies says which messages of a copy go. What lies before the cut is known by sequences if the copy has
// those of the stream, or says them, and otherwise by positions alone: an event of an earlier database
// cluster may have one behind the cut.
func (c *command) inCopies(name string) goes {
	copies := map[string]bool{c.cfg.Stream: true}
	for _, k := range c.rep.Copies {
		copies[k.Stream] = true
	}
	return func(h nats.Header, seq uint64, at time.Time) (bool, bool) {
		header, of := h.Get(outbox.HeaderName), name
		if s := sourceOf(h); s != nil {
			of, seq = s.from, s.seq
			if s := c.info(of); s != nil && s.live && !copies[of] {
				return false, false // another outbox has a document of that name
			}
		}
		created, known := c.sequencesOf(of)
		if !known || seq == 0 {
			goes := c.rec.Goes(header, 0)
			return goes, !goes && !c.rec.IsLast(header)
		}
		if at.Before(created) {
			created = time.Time{} // it is of a stream that had the name before
		}
		return c.rec.GoesFrom(created, header, seq), false
	}
}

// place is where a message of a stream with sources comes from.
type place struct {
	from    string // the stream
	filters string // of the source
	seq     uint64 // in that stream; 0: not known
	subject string // there, before a transform; "": not known
}

// sourceOf reads the header; nil: the message was not sourced. Its fields may have other white space in them
// than the blanks between them.
func sourceOf(h nats.Header) *place {
	fields := strings.Split(h.Get(headerSource), " ")
	if fields[0] == "" {
		return nil
	}
	s := &place{}
	s.from, _, _ = strings.Cut(fields[0], ":C=") // the consumer that the source names
	if len(fields) > 1 {
		s.seq, _ = strconv.ParseUint(fields[1], 10, 64)
	}
	if len(fields) > 4 {
		s.filters, s.subject = fields[2], fields[4]
	}
	return s
}

// listTries is how often the list of the account's streams is begun anew because some were deleted meanwhile.
const listTries = 20

// listStreams reads the account's streams, but for buckets. In a cluster the list names those whose leader
// does not answer, and says nothing else of them: each of them may have copies.
func (c *command) listStreams(ctx context.Context) error {
	defer progress.Wait(ctx, "waiting for NATS: the account's streams")()
	api := c.l.NATS.API()
	c.list = nil
	buckets := map[string]bool{}
	last, tries := "", 0
	for offset := 0; ; {
		var page struct {
			jsapi.Answer
			Total   int `json:"total"`
			Streams []struct {
				Created time.Time `json:"created"`
				Config  struct {
					Name     string            `json:"name"`
					Subjects []string          `json:"subjects"`
					Mirror   *origin           `json:"mirror"`
					Sources  []origin          `json:"sources"`
					Replicas int               `json:"num_replicas"`
					Metadata map[string]string `json:"metadata"`
					streamretain.Limits
				} `json:"config"`
			} `json:"streams"`
			Missing []string          `json:"missing"`
			Offline map[string]string `json:"offline"`
		}
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		err := api.Ask(ask, "STREAM.LIST", map[string]int{"offset": offset}, &page)
		cancel()
		if err != nil {
			return err
		}
		if away := slices.Sorted(maps.Keys(page.Offline)); len(page.Missing)+len(away) > 0 {
			return fmt.Errorf("list the account's streams: nobody answers for %s, and each may have copies "+
				"of the messages: run it again when their servers are back",
				strings.Join(append(page.Missing, away...), ", "))
		}
		// Each page begins with the last stream of the one before, or one was deleted and all moved up.
		n := len(page.Streams)
		if last != "" && (n < 2 || page.Streams[0].Config.Name != last) {
			if tries++; tries == listTries {
				return errors.New("list the account's streams: they change all the time: run it again")
			}
			c.list, last, offset = nil, "", 0
			clear(buckets)
			continue
		}
		for i, s := range page.Streams {
			k := s.Config
			if i == 0 && last != "" {
				continue
			}
			if strings.HasPrefix(k.Name, "KV_") || strings.HasPrefix(k.Name, "OBJ_") {
				buckets[k.Name] = true
				continue
			}
			info := streamInfo{name: k.Name, created: s.Created, replicas: k.Replicas,
				denied:    k.DeleteDenied(),
				restored:  k.Metadata[stream.MetadataRestored],
				restoring: k.Metadata[stream.MetadataRestoring]}
			if k.Mirror != nil {
				if k.Mirror.External == nil {
					info.mirror = k.Mirror.Name
				}
				k.Sources = append(k.Sources, *k.Mirror)
			}
			for _, o := range k.Sources {
				if o.External == nil {
					info.origins = append(info.origins, o)
				}
			}
			info.live = len(k.Subjects) == 1 && strings.HasPrefix(k.Subjects[0], "_outflow.")
			c.list = append(c.list, info)
		}
		if n == 0 || offset+n >= page.Total {
			break
		}
		last, offset = page.Streams[n-1].Config.Name, offset+n-1
	}
	for i := range c.list {
		info := &c.list[i]
		info.live = info.live && buckets["KV_"+checkpoint.Bucket(info.name)]
		if info.live {
			continue
		}
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		m, err := api.Message(ask, info.name, jsapi.MessageRequest{Last: ">"})
		cancel()
		if err != nil {
			return fmt.Errorf("stream %s: %w", info.name, err)
		}
		if m != nil {
			h, err := headerOf(m)
			info.outflow = err == nil && (outbox.CutOf(m.Subject, h) != nil ||
				h.Get(outbox.HeaderName) != "")
		}
	}
	return nil
}

// original is the subject that a message of another stream, or a replayed one, had in the stream. The header
// of a sourced one has it before a transform.
func (c *command) original(name, subject string, h nats.Header) string {
	if s := sourceOf(h); s != nil && s.subject != "" {
		name, subject = s.from, s.subject
	}
	// what outflow replay publishes has the original subject behind these
	for _, stream := range []string{c.cfg.Stream, name} {
		if rest, is := strings.CutPrefix(subject, "_outflow_replay."+stream+"."); is {
			_, rest, _ = strings.Cut(rest, ".") // the consumer
			return rest
		}
	}
	if rest, is := strings.CutPrefix(subject, "replay."+name+"."); is {
		return rest
	}
	return subject
}

// inCopy finds what goes from a copy. The document is in the subject that a message had in the stream. The
// state is that from before it was read.
func (c *command) inCopy(ctx context.Context, name string) (all []found, state copyState, err error) {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	state.asked = time.Now()
	err = c.l.NATS.API().Ask(ask, "STREAM.INFO."+name, nil, &state)
	cancel()
	if err != nil {
		return nil, state, err
	}
	original := func(subject string, h nats.Header) string { return c.original(name, subject, h) }
	all, err = c.find(ctx, name, state.State.Last, original, c.inCopies(name))
	return all, state, err
}

// eraseCopy erases from a copy.
func (c *command) eraseCopy(ctx context.Context, name string, until time.Time) error {
	all, err := c.inWhole(ctx, name, until)
	if err != nil {
		return err
	}
	if len(all) > 0 {
		if err := c.denied(name); err != nil {
			return err
		}
		ok, err := c.replicas(ctx, name, until, c.rec.Copies[name] > 0)
		if err != nil || !ok {
			return err
		}
	}
	c.rec.Copies[name] = max(c.rec.Copies[name], uint64(len(all))) // a run that is killed leaves fewer
	if err := c.ledger.Save(ctx, c.rec); err != nil {
		return err
	}
	if err := c.note(ctx, all); err != nil {
		return err
	}
	if c.ours(c.info(name).restored) { // and a consumer may read it
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		err := stream.New(c.l.NATS.API(), name, c.log).NoteErased(ask, sequences(all))
		cancel()
		if f := outbox.FaultOf(err); err != nil && (f == nil || f.Code != "erase_room") {
			return err
		}
	}
	task := progress.Count(ctx, "erasing from stream "+name, "messages", int64(len(all)))
	defer task.End()
	for _, f := range all {
		if err := c.delete(ctx, name, f); err != nil {
			return err
		}
		task.Add(1)
		c.o.Hit("erase.copy")
	}
	if c.rec.Copies[name] > 0 {
		_, err = c.replicas(ctx, name, until, true)
	}
	return err
}
