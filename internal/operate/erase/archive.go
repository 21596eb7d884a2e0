package erase

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/outbox"
)

// archive erases from all folders of the stream.
func (c *command) archive(ctx context.Context, until time.Time) error {
	current := archive.FolderOf(c.cfg.Stream, c.rd.Stream.Created)
	last, err := c.lastErased(ctx)
	if err != nil {
		return err
	}
	reached, archived := c.store == nil || last == 0, int64(0)
	err = c.eachFolder(ctx, func(a *archive.Archive, is func(*archive.Message) (bool, error)) error {
		name := c.rep.Folders[len(c.rep.Folders)-1]
		if name == current && last > 0 {
			// An archiver may hold one of them, which has read it before: not once the archive is beyond it.
			if reached = a.Next() > last; !reached {
				c.behind(a.Next()-1, last)
			}
		}
		if err := c.tidy(ctx, a, name, until); err != nil { // before it is listed what no manifest names
			return err
		}
		task := progress.Count(ctx, "erasing from archive "+name, "segments", int64(len(a.Segments)))
		defer task.End()
		var gone []found // of the segment at hand, and of one that somebody else has written anew meanwhile
		done, err := a.Erase(ctx, archive.Erasing{Request: c.o.Request,
			Is: func(m *archive.Message) (bool, error) {
				goes, err := is(m)
				if goes {
					gone = append(gone, found{m.Seq, m.Subject, m.Header.Get(outbox.HeaderName)})
				}
				return goes, err
			},
			Before: func() error {
				defer func() { gone = nil }()
				return c.note(ctx, gone)
			},
			Done: func() { task.Add(1) }})
		c.passed += done.Passed
		if err != nil {
			return err
		}
		if name == current {
			if err := c.unnamed(ctx, a, is); err != nil {
				return err
			}
		}
		n, err := a.ErasedBy(ctx, c.o.Request) // also what a run erased that was killed
		archived += n
		return err
	})
	if err == nil {
		c.rec.Archived = archived
		err = c.ledger.Save(ctx, c.rec)
	}
	if err == nil && !reached && len(c.rep.Waiting) == 0 {
		c.behind(0, last)
	}
	return err
}

// lastErased is the last sequence of the stream whose message was erased; 0: none was. Where the stream was
// made anew the request has sequences of the former one as well, and the stream's metadata say which are its.
func (c *command) lastErased(ctx context.Context) (last uint64, err error) {
	erased := c.rec.Erased
	if len(erased) > 0 && !micro(c.rd.Stream.Created).Equal(c.rec.Created) {
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		all, _, err := c.stream.Erased(ask)
		if err != nil {
			return 0, err
		}
		erased = nil
		for _, r := range c.rec.Erased {
			erased = erased.With(all.Within(r.From, r.To)...)
		}
	}
	if n := len(erased); n > 0 {
		last = erased[n-1].To
	}
	return last, nil
}

// tidy removes what killed archivers have left, and waits for those that are writing: what they write may
// have been read before it was erased.
func (c *command) tidy(ctx context.Context, a *archive.Archive, name string, until time.Time) error {
	defer progress.Wait(ctx, "waiting for whoever is writing to archive "+name)()
	for {
		busy, err := a.Tidy(ctx)
		if err != nil || len(busy) == 0 {
			return err
		}
		if more, err := pause(ctx, until); err != nil || !more {
			c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("somebody is writing file %s of the "+
				"archive: if nobody is, remove it", busy[0]))
			return err
		}
	}
}

// unnamed waits for what an archiver left that was killed before it could create a manifest: the archive
// comes beyond it.
func (c *command) unnamed(ctx context.Context, a *archive.Archive,
	is func(*archive.Message) (bool, error)) error {
	if err := a.Refresh(ctx); err != nil {
		return err
	}
	var in []string
	if err := a.ReadBehind(ctx, func(name string, m *archive.Message) error {
		goes, err := is(m)
		if goes && !slices.Contains(in, name) {
			in = append(in, name)
		}
		return err
	}); err != nil {
		return err
	}
	for _, name := range in {
		c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("object %s of the archive, which no manifest "+
			"names, has messages of the document: `outflow archive run --now`", name))
	}
	return nil
}

func (c *command) behind(at, last uint64) {
	ends, first := fmt.Sprintf("ends at sequence %d", at), ""
	if at == 0 { // to archive would begin one beside that which is away
		ends, first = "has nothing of this stream", "see that archive.url is where it was before, and "+
			"mounted, then "
	}
	c.rep.Waiting = append(c.rep.Waiting, fmt.Sprintf("the archive %s, and %d is the last message that was "+
		"erased: %s`outflow archive run --now`", ends, last, first))
}

// hashes are those of the subjects that messages of the document have; none: there may be others.
func (c *command) hashes() []string {
	if c.doc.Subject() == "" {
		return nil
	}
	return []string{archive.SubjectHash(c.doc.Subject()), archive.SubjectHash(c.doc.Dead())}
}

// archived is the place of what a folder of the archive has.
func archived(folder string) string { return "archive " + folder }

// eachFolder calls f with each archive of the stream, and of those that had its name before, and with what of
// it goes. The others do not wait for one that is damaged, which is the error then.
func (c *command) eachFolder(ctx context.Context,
	f func(a *archive.Archive, is func(*archive.Message) (bool, error)) error) error {
	if c.store == nil {
		return nil
	}
	folders, err := archive.Folders(ctx, c.store, c.cfg.Stream)
	if err != nil {
		return err
	}
	c.empty, c.leftovers, c.nowhere, c.passed = len(folders) == 0, nil, nil, 0
	st := c.rd.Stream
	current, last, has := archive.FolderOf(c.cfg.Stream, st.Created), uint64(0), st.Erased
	var damaged error
	for _, name := range folders {
		a, err := archive.Load(ctx, c.store, name, c.o.Hit, c.hashes()...)
		if err == nil {
			if name == current || name == st.Restored { // they have the same sequences
				has = has.With(a.Gaps().Lacking(1, a.Next()-1)...)
			}
			if name == current {
				last = a.Next() - 1
			}
			err = c.folder(ctx, name, name == current, a, f)
		}
		if damaged = cmp.Or(damaged, err); err != nil && !archive.IsDamaged(err) {
			return err
		}
	}
	if damaged == nil {
		c.nowhere = has.Lacking(1, max(last, max(st.FirstSeq, 1)-1))
	}
	return damaged
}

// folder calls f with one of them.
func (c *command) folder(ctx context.Context, name string, current bool, a *archive.Archive,
	f func(a *archive.Archive, is func(*archive.Message) (bool, error)) error) error {
	c.rep.Folders = append(c.rep.Folders, name)
	if !current {
		left, err := a.Leftovers(ctx)
		if err != nil {
			return err
		}
		c.leftovers = append(c.leftovers, left...)
	}
	created, told, stayed, place := micro(a.Created()), uint64(0), uint64(0), archived(name)
	c.untold[place], c.stays[place] = 0, nil
	return f(a, func(m *archive.Message) (bool, error) {
		if outbox.CutOf(m.Subject, m.Header) != nil {
			return false, nil
		}
		is, known := c.doc.Is(m.Subject, m.Header, m.Data)
		if !known && m.Seq > told { // a segment may be read again
			c.untold[place]++
			told = m.Seq
		}
		goes, unsure := c.goesFrom(created, m.Header.Get(outbox.HeaderName), m.Seq)
		if is && unsure && m.Seq > stayed {
			c.stays[place] = append(c.stays[place], m.Seq)
			stayed = m.Seq
		}
		return is && goes, nil
	})
}
