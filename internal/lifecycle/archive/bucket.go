package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
)

// bucket is a Store in an object store.
type bucket struct{ b *blob.Bucket }

// What s3store and gcsstore ask of their drivers, where those are built in.
var (
	whole  = func(*blob.Bucket, func(any) bool) error { return nil }
	after  []func(name string, as func(any) bool) error
	denies []func(err error) bool // by the answer itself: Google's driver says that nothing is there
)

// tags are the build tags of the drivers, by the schemes of their URLs.
var tags = map[string]string{"s3": "s3", "gs": "gcs", "azblob": "azure"}

const validation = "response_checksum_validation"

// storeTimeout bounds one request, with the driver's own attempts.
const storeTimeout = 15 * time.Minute

// ask bounds a request, and shows that it is waited for.
func ask(ctx context.Context, name string) (context.Context, func()) {
	waited := progress.Wait(ctx, "waiting for the archive: "+name)
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	return ctx, func() {
		cancel()
		waited()
	}
}

// openBucket opens it. The client of S3 checks no answer by the checksum of the store, unless the URL wants
// that: the archive has its own, and the client warns of each that it can't check.
func openBucket(ctx context.Context, u *url.URL) (Store, error) {
	if q := u.Query(); u.Scheme == "s3" && !q.Has(validation) {
		q.Set(validation, "when_required")
		u.RawQuery = q.Encode()
	}
	if !blob.DefaultURLMux().ValidBucketScheme(u.Scheme) {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "archive_url",
			Message: "archive.url is a bucket, and this program was built without the driver for it",
			Hint: fmt.Sprintf("Build it with `go build -tags %s ./cmd/outflow`, or name a folder",
				tags[u.Scheme])}
	}
	b, err := blob.OpenBucket(ctx, u.String())
	if err != nil {
		return nil, &outbox.Fault{Class: outbox.Usage, Code: "archive_url",
			Message: fmt.Sprintf("archive.url can't be used: %v", err)}
	}
	return &bucket{b}, nil
}

func (b *bucket) Close() error { return b.b.Close() }

// Create relies on conditional writes. A request that is tried again after its answer was lost finds the
// object that it made itself: whoever creates has to bear that. The object is written by one request,
// whatever its size: the buffer is larger, and S3 has Whole.
func (b *bucket) Create(ctx context.Context, name string, data []byte) error {
	ctx, done := ask(ctx, name)
	defer done()
	err := b.write(ctx, name, data, &blob.WriterOptions{IfNotExist: true,
		ContentType: "application/octet-stream", BufferSize: len(data) + 1,
		BeforeWrite: func(as func(any) bool) error { return whole(b.b, as) }})
	if gcerrors.Code(err) == gcerrors.FailedPrecondition {
		return ErrExists
	}
	return named(name, err)
}

func (b *bucket) Replace(ctx context.Context, name string, data []byte) error {
	ctx, done := ask(ctx, name)
	defer done()
	return named(name, b.write(ctx, name, data,
		&blob.WriterOptions{ContentType: "application/octet-stream"}))
}

// write is in place of WriteAll: Azure's driver panics where what was given by Write is refused.
func (b *bucket) write(ctx context.Context, name string, data []byte, opts *blob.WriterOptions) error {
	return b.b.Upload(ctx, name, bytes.NewReader(data), opts)
}

func (b *bucket) Read(ctx context.Context, name string, limit int64) (data []byte, err error) {
	ctx, done := ask(ctx, name)
	defer done()
	r, err := b.b.NewReader(ctx, name, nil)
	if gcerrors.Code(err) == gcerrors.NotFound && !forbidden(err) {
		return nil, ErrMissing
	}
	if err != nil {
		return nil, named(name, err)
	}
	defer func() { err = errors.Join(err, named(name, r.Close())) }()
	if r.Size() > limit {
		return nil, fmt.Errorf("archive: %s has %d bytes, more than %d", name, r.Size(), limit)
	}
	// A server, or a proxy, that answers in chunks says no size.
	got := bytes.NewBuffer(make([]byte, 0, max(r.Size(), 0)+bytes.MinRead))
	if _, err := got.ReadFrom(io.LimitReader(r, limit+1)); err != nil {
		return nil, named(name, err)
	}
	if int64(got.Len()) > limit {
		return nil, fmt.Errorf("archive: %s has more than %d bytes", name, limit)
	}
	return got.Bytes(), nil
}

func (b *bucket) List(ctx context.Context, folder, behind string) (names []string, err error) {
	ctx, done := ask(ctx, folder)
	defer done()
	opts := &blob.ListOptions{Prefix: folder, Delimiter: "/"}
	if behind != "" {
		opts.BeforeList = func(as func(any) bool) error {
			for _, f := range after {
				if err := f(behind, as); err != nil {
					return err
				}
			}
			return nil
		}
	}
	all := b.b.List(opts)
	for {
		o, err := all.Next(ctx)
		if errors.Is(err, io.EOF) {
			slices.Sort(names) // most servers have done so
			return names, nil
		}
		if err != nil {
			return nil, named(folder, err)
		}
		if name := strings.TrimPrefix(o.Key, folder); name > behind { // Azure and old servers list all
			names = append(names, name)
		}
	}
}

// Tidy has nothing to do: an object is made by one request.
func (b *bucket) Tidy(context.Context, string) ([]string, error) { return nil, nil }

// forbidden reports whether the store has refused a request for want of a right.
func forbidden(err error) bool {
	return gcerrors.Code(err) == gcerrors.PermissionDenied ||
		slices.ContainsFunc(denies, func(says func(error) bool) bool { return says(err) })
}

func named(name string, err error) error {
	if err == nil {
		return nil
	}
	said := fmt.Errorf("archive: %s: %w", name, err)
	if forbidden(err) {
		return refused(said, "the store refuses this to the credentials of this process")
	}
	return said
}

// CheckCreate refuses a store that overwrites objects that exist: two archivers would each create a manifest,
// and fork the chain. It leaves a small object behind.
func CheckCreate(ctx context.Context, store Store) error {
	if _, local := store.(*folder); local {
		return nil
	}
	text := []byte("By this object Outflow finds out whether the store honours conditional writes.\n")
	for range 2 {
		if err := store.Create(ctx, root+"create-if-absent", text); errors.Is(err, ErrExists) {
			return nil
		} else if err != nil {
			return err
		}
	}
	return &outbox.Fault{Class: outbox.Usage, Code: "archive_url",
		Message: "the store of archive.url overwrites objects that exist: " +
			"it does not honour conditional writes"}
}
