package outbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
)

// HeaderOrigin is the name of the header that says whose event a message is where several clusters share
// nothing and publish for one another: cluster.id of its home, in decimal, from 1 to [MaxCluster]. The home's
// own messages have it as well. Positions are the home's: only with it do they tell events of several
// clusters apart.
const HeaderOrigin = "Outflow-Origin"

// AppendOriginID appends the Nats-Msg-Id of a message with [HeaderOrigin], 1-0/16B3748-3-9f86d081884c7d65:
// home, position, and the first 8 bytes of the SHA-256 of the event's id, empty if it has none. It is the
// same whoever publishes the event. The id is part of it because whoever goes by it drops the second message
// unseen, and a server that was restored from an older copy may give a position twice.
func AppendOriginID(b []byte, home int, p Position, id string) []byte {
	b = append(strconv.AppendInt(b, int64(home), 10), '-')
	b = append(p.Append(b), '-')
	sum := sha256.Sum256([]byte(id))
	return hex.AppendEncode(b, sum[:8])
}

// HomeOf returns cluster.id of the home that a message names; 0 if it names none. An error says that it has
// such a header and that Outflow didn't write it.
func HomeOf(header map[string][]string) (int, error) {
	values := header[HeaderOrigin]
	if len(values) == 0 {
		return 0, nil
	}
	home, err := strconv.Atoi(values[0])
	if err != nil || home < 1 || home > MaxCluster || strconv.Itoa(home) != values[0] || len(values) > 1 {
		return 0, fmt.Errorf("header %s %.200q: want one number from 1 to %d", HeaderOrigin, values,
			MaxCluster)
	}
	return home, nil
}
