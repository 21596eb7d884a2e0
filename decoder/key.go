package decoder

import (
	"strings"
	"unicode/utf8"
)

// counterWidth is to how many characters a counter is padded, or cut, in a computed key.
const counterWidth = 20

// key is the seq_key that a stored generated column would hold, exactly as SQL makes it:
//
//	actor || ':' || lpad(counter::text, 20, '0')
//
// lpad counts characters, puts the zeros before a minus sign too, and cuts what is longer at its right end.
func (a *arena) key(actor, counter string) string {
	end, n := 0, 0
	for end < len(counter) && n < counterWidth {
		_, size := utf8.DecodeRuneInString(counter[end:])
		end, n = end+size, n+1
	}
	b := a.take(len(actor) + 1 + counterWidth - n + end)
	b = append(b, actor...)
	b = append(b, ':')
	for ; n < counterWidth; n++ {
		b = append(b, '0')
	}
	return asString(append(b, counter[:end]...))
}

// cast is the text that value::text gives where it differs from what the column prints: bool is spelt out,
// and the padding of char(n) does not count.
func cast(typeOID uint32, printed string) string {
	switch typeOID {
	case oidBool:
		if printed == "t" {
			return "true"
		}
		return "false"
	case oidBpchar:
		return strings.TrimRight(printed, " ")
	}
	return printed
}
