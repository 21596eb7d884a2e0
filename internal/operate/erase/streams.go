package erase

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/internal/jsapi"
	"github.com/outflowhq/outflow/internal/lifecycle/archive"
	"github.com/outflowhq/outflow/internal/lifecycle/streamretain"
	"github.com/outflowhq/outflow/outbox"
	"github.com/outflowhq/outflow/sink/stream"
)

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

// info is what is known of a stream; nil if there is none.
func (c *command) info(name string) *streamInfo {
	if i := slices.IndexFunc(c.list, func(s streamInfo) bool { return s.name == name }); i >= 0 {
		return &c.list[i]
	}
	return nil
}

// listTries is how often the list of the account's streams is begun anew because some were deleted meanwhile.
const listTries = 20

// listStreams reads the account's streams, but for buckets that copy nothing: any stream may be named like
// one. In a cluster the list names those whose leader does not answer, and says nothing else of them: each of
// them may have copies.
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
			if strings.HasPrefix(k.Name, "KV_") || strings.HasPrefix(k.Name, "OBJ_") {
				buckets[k.Name] = true
				if len(info.origins) == 0 && info.restored == "" && info.restoring == "" {
					continue
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
