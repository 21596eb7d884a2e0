package producer

// The limits of PostgreSQL's numeric, in which jsonb keeps a number.
const (
	maxWhole    = 131072    // digits before the decimal point
	maxFraction = 16383     // digits after it, zeros too
	maxExponent = 1<<30 - 2 // of either sign, whatever the number is then; PostgreSQL 16 takes one more, of a zero
)

// number reads a number and returns its size as jsonb prints it: all digits, no exponent, as many decimals as were written.
func (w *walker) number() int {
	start := w.at
	negative := w.text[w.at] == '-'
	if negative {
		w.at++
	}
	whole := w.digits()
	switch {
	case whole == 0:
		return w.fail("want a digit")
	case whole > 1 && w.text[w.at-whole] == '0':
		return w.fail("a number begins with a zero too many")
	}
	leading := 0 // zeros before the first digit that counts, among the digits of whole and fraction
	zero := true
	count := func(digits []byte) {
		for _, c := range digits {
			if c != '0' {
				zero = false
			}
			if zero {
				leading++
			}
		}
	}
	count(w.text[w.at-whole : w.at])
	fraction := 0
	if w.at < len(w.text) && w.text[w.at] == '.' {
		w.at++
		if fraction = w.digits(); fraction == 0 {
			return w.fail("want a digit after the point")
		}
		count(w.text[w.at-fraction : w.at])
	}
	exponent, ok := w.exponent()
	if !ok {
		return 0
	}
	if !w.jsonb {
		return w.at - start
	}
	decimals := max(0, fraction-exponent)
	before := whole + exponent - leading // digits before the point; 0 or less: none counts
	if zero {
		before, negative = 0, false
	}
	if exponent > maxExponent || exponent < -maxExponent || decimals > maxFraction || before > maxWhole {
		w.at = start
		return w.fail("a number is beyond what jsonb can hold, 131,072 digits before the point and 16,383 after it,")
	}
	size := max(1, before)
	if negative {
		size++
	}
	if decimals > 0 {
		size += 1 + decimals
	}
	return size
}

// digits reads digits and returns how many there are.
func (w *walker) digits() int {
	start := w.at
	for w.at < len(w.text) && w.text[w.at] >= '0' && w.text[w.at] <= '9' {
		w.at++
	}
	return w.at - start
}

// exponent reads an exponent, 0 if there is none. One that is far too large stops counting.
func (w *walker) exponent() (e int, ok bool) {
	if w.at == len(w.text) || w.text[w.at]|0x20 != 'e' {
		return 0, true
	}
	w.at++
	negative := false
	if w.at < len(w.text) && (w.text[w.at] == '+' || w.text[w.at] == '-') {
		negative = w.text[w.at] == '-'
		w.at++
	}
	n := w.digits()
	if n == 0 {
		w.fail("want a digit in the exponent")
		return 0, false
	}
	for _, c := range w.text[w.at-n : w.at] {
		if e = e*10 + int(c-'0'); e > maxExponent {
			e = maxExponent + 1
		}
	}
	if negative {
		e = -e
	}
	return e, true
}
