package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/outbox"
)

// Outcomes of a write that a caller branches on. Any other error means that nothing was written.
var (
	// ErrConflict says that the record is not at the revision that was expected: somebody else wrote it.
	ErrConflict = errors.New("the checkpoint record was written by somebody else")
	// ErrUnknown says that no answer came: the record may have been written or not, now or later.
	ErrUnknown = errors.New("it is not known whether the checkpoint record was written")
)

// history is how many revisions of a record the bucket keeps: what is left when the broker lost the newest
// ones.
const history = 64

// Bucket returns the name of the key-value bucket of a stream's record.
func Bucket(stream string) string { return "outflow-" + stream }

// StoreConfig says where a record is.
type StoreConfig struct {
	Stream string // of the messages; the bucket is named after it
	Slot   string // the key, unless Standby
	// Cluster is the cluster.id of whoever shares the stream with other clusters, or lets them publish for
	// it; 0: a record with an owner, or a hello, is refused.
	Cluster int
	// Standby: it is what Cluster keeps for itself of the home whose stream it is, by the slot from which it
	// reads the home's rows; see [Record.WithoutStream].
	Standby bool
	// Owned: a record of which another cluster is the owner is refused: it is not this one's to work on.
	Owned bool
}

// The codes of a record that is not as the caller has to be.
const (
	CodeMode  = "cluster_mode"  // it is shared by clusters, or not
	codeOwner = "cluster_owner" // another cluster is the owner
)

// checkOwner refuses a record of clusters that is not the caller's to read.
func (s *Store) checkOwner(rec *Record) error {
	switch {
	case rec.Epoch > 0 && s.cfg.Cluster == 0:
		return &outbox.Fault{
			Class: outbox.Fatal, Code: CodeMode,
			Message: fmt.Sprintf("clusters share stream %s: its checkpoint record has cluster %d as the "+
				"owner, in epoch %d, and cluster.mode is not shared", rec.Stream, rec.Owner, rec.Epoch),
			Hint: "Set cluster.mode to shared, as it is on the other clusters",
		}
	case rec.Hello > 0 && s.cfg.Cluster == 0:
		return &outbox.Fault{
			Class: outbox.Fatal, Code: CodeMode,
			Message: fmt.Sprintf("other clusters publish what slot %s does not, by its checkpoint record, "+
				"and cluster.mode is not islands", rec.Slot),
			Hint: "Set cluster.mode to islands, as it is on the other clusters",
		}
	case s.cfg.Owned:
		return OwnerFault(rec, s.cfg.Cluster)
	}
	return nil
}

// OwnerFault is the fault of a record of which another cluster than that one is the owner; nil if none is.
func OwnerFault(rec *Record, cluster int) error {
	if rec == nil || rec.Epoch == 0 || rec.Owner == cluster {
		return nil
	}
	return &outbox.Fault{
		Class: outbox.Fatal, Code: codeOwner,
		Message: fmt.Sprintf("cluster %d makes stream %s at present, in epoch %d", rec.Owner, rec.Stream,
			rec.Epoch),
		Hint: "Start `outflow run` here, at home, which takes the stream back, leave it running, and run " +
			"the command again. If it can't start, `outflow repair` takes the stream",
	}
}

// Store reads and writes one checkpoint record in a JetStream key-value bucket. It is safe for concurrent
// use; the connection stays the caller's.
type Store struct {
	api     *jsapi.Client
	cfg     StoreConfig
	stream  string // the bucket's stream
	key     string // of the record
	subject string // its subject, as it is stored
}

// NewStore returns the store of a record.
func NewStore(api *jsapi.Client, cfg StoreConfig) *Store {
	s := &Store{api: api, cfg: cfg, stream: "KV_" + Bucket(cfg.Stream), key: cfg.Slot}
	if cfg.Standby {
		s.key = standbyKey(cfg.Cluster)
	}
	s.subject = s.beside(s.key)
	return s
}

// EnsureBucket makes the bucket if there is none, and checks one that is there.
func (s *Store) EnsureBucket(ctx context.Context, replicas int, storage jetstream.StorageType) error {
	if there, err := s.CheckBucket(ctx); there || err != nil {
		return err
	}
	js, err := s.api.JetStream()
	if err == nil {
		_, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket:      Bucket(s.cfg.Stream),
			Description: "outflow: where the slots that publish to stream " + s.cfg.Stream + " are",
			History:     history,
			Replicas:    replicas,
			Storage:     storage,
		})
	}
	if err != nil {
		return fmt.Errorf("make checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	return nil
}

// CheckBucket reports whether there is a bucket, and refuses one (a fatal fault, code bucket_config) that
// would not keep the record.
func (s *Store) CheckBucket(ctx context.Context) (there bool, err error) {
	js, err := s.api.JetStream()
	if err != nil {
		return false, fmt.Errorf("checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	kv, err := js.KeyValue(ctx, Bucket(s.cfg.Stream))
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	st, err := kv.Status(ctx)
	if err != nil {
		return false, fmt.Errorf("checkpoint bucket %s: %w", Bucket(s.cfg.Stream), err)
	}
	if st.History() < history || st.TTL() != 0 {
		return true, &outbox.Fault{
			Class: outbox.Fatal, Code: "bucket_config",
			Message: fmt.Sprintf("key-value bucket %s keeps %d revisions for %v", st.Bucket(), st.History(),
				st.TTL()),
			Hint: hintBucket(s.stream),
		}
	}
	return true, nil
}

// Load returns the record and its revision through the stream's leader. The record is nil where there is
// none: no bucket, no key, or one that was deleted (the revision is then the deletion's). Faults: those of
// [Decode]; the revision is that of what can't be read.
func (s *Store) Load(ctx context.Context) (*Record, uint64, error) {
	m, err := s.api.Message(ctx, s.stream, jsapi.MessageRequest{Last: s.subject})
	switch {
	case jsapi.Refused(err, jetstream.JSErrCodeStreamNotFound), err == nil && m == nil:
		return nil, 0, nil
	case err != nil:
		return nil, 0, fmt.Errorf("read checkpoint record %s: %w", s.subject, err)
	}
	header, err := nats.DecodeHeadersMsg(m.Header)
	if len(m.Header) > 0 && err != nil {
		return nil, 0, fmt.Errorf("read checkpoint record %s: %w", s.subject, err)
	}
	if op := header.Get("KV-Operation"); op == "DEL" || op == "PURGE" ||
		header.Get("Nats-Marker-Reason") != "" {
		return nil, m.Seq, nil
	}
	rec, err := Decode(m.Data)
	if err == nil && (rec.Slot != s.cfg.Slot || rec.Stream != s.cfg.Stream) {
		err = corrupt(fmt.Errorf("it is of slot %s and stream %s", rec.Slot, rec.Stream))
	}
	if err == nil {
		if err := s.checkOwner(rec); err != nil {
			return nil, 0, err
		}
	}
	if f := outbox.FaultOf(err); f != nil {
		f.Message += fmt.Sprintf(" (bucket %s, key %s, revision %d)", Bucket(s.cfg.Stream), s.key, m.Seq)
		return nil, m.Seq, f
	}
	rec.StoredAt(m.Time)
	return rec, m.Seq, nil
}

// Save writes the record if its newest revision is still last (0: there is none) and returns the new
// revision. ErrConflict: it is not. ErrUnknown: no answer came before ctx ended or the connection was lost.
func (s *Store) Save(ctx context.Context, rec *Record, last uint64) (uint64, error) {
	doc, err := rec.Encode()
	if err != nil {
		return 0, err
	}
	m := nats.NewMsg(s.api.PublishSubject(s.subject))
	m.Data = doc
	m.Header.Set("Nats-Expected-Stream", s.stream)
	m.Header.Set("Nats-Expected-Last-Subject-Sequence", strconv.FormatUint(last, 10))
	answer, err := s.api.NATS().RequestMsgWithContext(ctx, m)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return 0, fmt.Errorf("write checkpoint record %s: %w", s.subject, err)
	case err != nil:
		return 0, fmt.Errorf("write checkpoint record %s: %w: %w", s.subject, ErrUnknown, err)
	}
	var got jsapi.Ack
	if err := json.Unmarshal(answer.Data, &got); err != nil {
		return 0, fmt.Errorf("write checkpoint record %s: %w: %w", s.subject, ErrUnknown, err)
	}
	if got.Error != nil {
		// A replicated stream answers the second code while another write of the same key is not applied yet.
		if jsapi.Refused(got.Error, jetstream.JSErrCodeStreamWrongLastSequence,
			jetstream.JSErrCodeStreamWrongLastSequenceConstant) {
			return 0, fmt.Errorf("write checkpoint record %s at revision %d: %w (%w)", s.subject, last,
				ErrConflict, got.Error)
		}
		return 0, fmt.Errorf("write checkpoint record %s: %w", s.subject, got.Error)
	}
	if got.Seq <= last {
		return 0, fmt.Errorf("write checkpoint record %s: %w: revision %d after %d", s.subject, ErrUnknown,
			got.Seq, last)
	}
	return got.Seq, nil
}

// Remove removes the record if its newest revision is still last, and what [Store.SaveEnd], [Store.SaveGaps]
// and [Store.SaveMaintained] have stored beside it. Without a bucket there is nothing to remove. ErrConflict:
// somebody else wrote the record.
func (s *Store) Remove(ctx context.Context, last uint64) error {
	fail := func(err error) error { return fmt.Errorf("remove checkpoint record %s: %w", s.subject, err) }
	js, err := s.api.JetStream()
	if err != nil {
		return fail(err)
	}
	kv, err := js.KeyValue(ctx, Bucket(s.cfg.Stream))
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil
	}
	if err != nil {
		return fail(err)
	}
	err = kv.Purge(ctx, s.key, jetstream.LastRevision(last))
	var refused *jetstream.APIError
	if errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return fail(ErrConflict)
	}
	for _, key := range []string{endKey(s.key), gapsKey(s.key), maintainedKey(s.key)} {
		if err == nil {
			err = kv.Purge(ctx, key)
		}
	}
	if err != nil {
		return fail(err)
	}
	return nil
}
