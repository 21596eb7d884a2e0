package decoder

import (
	"math"
	"strconv"
)

// The ranges are PostgreSQL's (datatype/timestamp.h): what lies outside, and is not an infinity, it never
// stores.
const (
	minTimestamp = -211813488000000000 // 4714-11-24 00:00:00 BC, microseconds since 2000
	endTimestamp = 9223371331200000000 // 294277-01-01, exclusive
	minDate      = -2451545            // 4714-11-24 BC, days since 2000
	endDate      = 2147483494 - 2451545

	microsPerDay   = 86_400_000_000
	daysFrom1970   = 10957   // to 2000-01-01
	daysPerEra     = 146_097 // 400 Gregorian years
	daysFrom0March = 719_468 // 0000-03-01 to 1970-01-01
)

// appendTimestamp appends t, microseconds since 2000-01-01 00:00 UTC, as PostgreSQL prints it with DateStyle
// ISO and TimeZone UTC. ok is false outside PostgreSQL's range.
func appendTimestamp(b []byte, t int64, zone string) (_ []byte, ok bool) {
	switch {
	case t == math.MaxInt64:
		return append(b, "infinity"...), true
	case t == math.MinInt64:
		return append(b, "-infinity"...), true
	case t < minTimestamp || t >= endTimestamp:
		return b, false
	}
	days, micros := t/microsPerDay, t%microsPerDay
	if micros < 0 {
		days, micros = days-1, micros+microsPerDay
	}
	b, bc := appendDay(b, days)
	seconds, fraction := micros/1_000_000, micros%1_000_000
	b = appendTwo(append(b, ' '), seconds/3600)
	b = appendTwo(append(b, ':'), seconds/60%60)
	b = appendTwo(append(b, ':'), seconds%60)
	if fraction != 0 {
		b = appendPadded(append(b, '.'), fraction, 6)
		for b[len(b)-1] == '0' {
			b = b[:len(b)-1]
		}
	}
	b = append(b, zone...)
	if bc {
		b = append(b, " BC"...)
	}
	return b, true
}

// appendDate appends d, days since 2000-01-01, as PostgreSQL prints a date with DateStyle ISO.
func appendDate(b []byte, d int32) (_ []byte, ok bool) {
	switch {
	case d == math.MaxInt32:
		return append(b, "infinity"...), true
	case d == math.MinInt32:
		return append(b, "-infinity"...), true
	case d < minDate || d >= endDate:
		return b, false
	}
	b, bc := appendDay(b, int64(d))
	if bc {
		b = append(b, " BC"...)
	}
	return b, true
}

// appendDay appends year, month and day of the proleptic Gregorian calendar; bc says that the year counts
// before Christ.
func appendDay(b []byte, days int64) (_ []byte, bc bool) {
	// Years begin in March here, so that the leap day is the last of its year and eras of 400 years repeat
	// exactly.
	z := days + daysFrom1970 + daysFrom0March
	era := z / daysPerEra
	if z%daysPerEra < 0 {
		era--
	}
	doe := z - era*daysPerEra
	yoe := (doe - doe/1460 + doe/36524 - doe/146096) / 365
	doy := doe - (365*yoe + yoe/4 - yoe/100)
	mp := (5*doy + 2) / 153
	day, month, year := doy-(153*mp+2)/5+1, mp+3, yoe+era*400
	if month > 12 {
		month, year = month-12, year+1
	}
	if year <= 0 {
		year, bc = 1-year, true
	}
	b = appendPadded(b, year, 4)
	b = appendTwo(append(b, '-'), month)
	return appendTwo(append(b, '-'), day), bc
}

// appendTwo appends v, 0 to 99, in two digits.
func appendTwo(b []byte, v int64) []byte { return append(b, byte('0'+v/10), byte('0'+v%10)) }

// appendPadded appends v, not negative, with zeros on the left up to width.
func appendPadded(b []byte, v int64, width int) []byte {
	for limit, i := int64(10), 1; i < width; limit, i = limit*10, i+1 {
		if v < limit {
			b = append(b, '0')
		}
	}
	return strconv.AppendInt(b, v, 10)
}
