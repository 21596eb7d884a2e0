package relay

import (
	"fmt"
	"strconv"
	"strings"
)

// maxShards is the greatest number of shards that a table can be divided into: each takes a slot, and decodes
// the whole WAL.
const maxShards = 64

// Shard says which part of the table's rows is published: of Of parts the one with number Index, by a hash of
// the document. The zero value is the whole table.
type Shard struct {
	Index int // from 0 to Of-1
	Of    int // 1 to maxShards; 0: the table is not divided
}

// ParseShard reads "k/n", such as 0/4, or "".
func ParseShard(s string) (Shard, error) {
	if s == "" {
		return Shard{}, nil
	}
	index, of, _ := strings.Cut(s, "/")
	var sh Shard
	var err error
	if sh.Index, err = strconv.Atoi(index); err == nil {
		sh.Of, err = strconv.Atoi(of)
	}
	if err != nil || !sh.valid() || sh.String() != s {
		return Shard{}, fmt.Errorf("shard %q: want k/n, n from 1 to %d and k from 0 to n-1", s, maxShards)
	}
	return sh, nil
}

func (s Shard) valid() bool { return s.Of >= 1 && s.Of <= maxShards && s.Index >= 0 && s.Index < s.Of }

// Whole reports whether the table is not divided.
func (s Shard) Whole() bool { return s == Shard{} }

// String is what ParseShard reads.
func (s Shard) String() string {
	if s.Whole() {
		return ""
	}
	return fmt.Sprintf("%d/%d", s.Index, s.Of)
}

// MarshalText is String.
func (s Shard) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is ParseShard.
func (s *Shard) UnmarshalText(text []byte) (err error) {
	*s, err = ParseShard(string(text))
	return err
}
