package dialects

import "bytes"

// oneLine returns the first event of b and its data, where that event is one line of data and nothing else, as nearly all are; else nothing.
func oneLine(b []byte) (raw, data []byte) {
	const before = "data: "
	i := bytes.IndexByte(b, '\n')
	if i < len(before) || i+1 >= len(b) || b[i+1] != '\n' || string(b[:len(before)]) != before {
		return nil, nil
	}
	return b[:i+2], bytes.TrimSpace(b[len(before):i])
}

// nextRaw returns the first event of b, which ends in a whole one, up to behind its empty line.
func nextRaw(b []byte) []byte {
	if i := bytes.IndexByte(b, '\n'); i >= 0 && i+1 < len(b) && b[i+1] == '\n' { // the first line ends it
		return b[:i+2]
	}
	end := len(b)
	if i := bytes.Index(b, []byte("\n\n")); i >= 0 {
		end = i + 2
	}
	if i := bytes.Index(b[:end], []byte("\n\r\n")); i >= 0 {
		end = i + 3
	}
	return b[:end]
}

// dataOf returns an event's data, of several lines the first; false when it has none.
func dataOf(event []byte) ([]byte, bool) {
	for line := range bytes.Lines(event) {
		if arg, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			return bytes.TrimSpace(arg), true
		}
	}
	return nil, false
}
