package producer

// list is a column's values as one parameter: a text that PostgreSQL reads as an array of text. One text
// passes through every driver alike, whatever it makes of slices, and its elements arrive byte for byte.
type list struct{ b []byte }

func (l *list) sep() {
	if len(l.b) == 0 {
		l.b = append(l.b, '{')
	} else {
		l.b = append(l.b, ',')
	}
}

func (l *list) null() {
	l.sep()
	l.b = append(l.b, "NULL"...)
}

// add adds a value; it has no byte 0.
func (l *list) add(value string) { addTo(l, value) }

func (l *list) addBytes(value []byte) { addTo(l, value) }

func addTo[T string | []byte](l *list, value T) {
	l.sep()
	l.b = append(l.b, '"')
	start := 0
	for i := range len(value) {
		if c := value[i]; c == '"' || c == '\\' {
			l.b = append(append(l.b, value[start:i]...), '\\')
			start = i
		}
	}
	l.b = append(append(l.b, value[start:]...), '"')
}

// param is the parameter.
func (l *list) param() any { return string(append(l.b, '}')) }
