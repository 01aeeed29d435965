package router

import (
	"bytes"
	"unsafe"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
)

// usage is what an engine counted of a request; known is false where it said nothing.
type usage struct {
	openai.Usage
	known bool
}

var responseDone = []byte(`"response":{`)

// take reads the usage out of an event of a stream: OpenAI's, that of /v1/responses or SGLang's own.
func (u *usage) take(event []byte) {
	v := gjson.GetBytes(event, "usage")
	if !v.IsObject() {
		if v = gjson.GetBytes(event, "response.usage"); !v.IsObject() {
			v = gjson.GetBytes(event, "meta_info")
		}
	}
	u.read(v)
}

// takeWhole is take for a whole answer, which may be long.
func (u *usage) takeWhole(answer []byte) {
	if !u.atEnd(answer) {
		u.lookThrough(answer)
	}
}

// lookThrough is takeWhole wherever the usage stands.
func (u *usage) lookThrough(answer []byte) {
	v := body.Member(answer, "usage")
	if v == nil {
		v = body.Member(answer, "meta_info")
	}
	if len(v) > 0 {
		u.read(gjson.Parse(unsafe.String(unsafe.SliceData(v), len(v)))) // nothing of it is kept but numbers
	}
}

// usageKey begins a usage as engines write it. Within a string its quotes would be escaped.
var usageKey = []byte(`"usage":{`)

// atEnd reads the usage of an answer whose last object it is, which is where engines put it: true if it was found and is of plain
// numbers, so that the answer need not be looked through from its beginning.
func (u *usage) atEnd(answer []byte) bool {
	i := bytes.LastIndex(answer[max(0, len(answer)-usageBytesMax):], usageKey)
	if i < 0 {
		return false
	}
	b := answer[max(0, len(answer)-usageBytesMax)+i+len(usageKey):]
	found, n, ok := numbers(b, true)
	if !ok || !lastObject(b[n:]) {
		return false
	}
	found.known = true
	*u = found
	return true
}

// usageBytesMax is where a usage at the end is looked for.
const usageBytesMax = 1024

// numbers reads the members of an object up to its end, n bytes from here: numbers, null and one object like itself of details.
func numbers(b []byte, outer bool) (u usage, n int, ok bool) {
	for i := 0; i < len(b); {
		if b[i] == '}' && (i == 0 || b[i-1] != ',') {
			return u, i + 1, true
		}
		if b[i] != '"' {
			return u, 0, false
		}
		end := bytes.IndexByte(b[i+1:], '"')
		if end < 0 {
			return u, 0, false
		}
		key := b[i+1 : i+1+end]
		if i += end + 2; i+1 >= len(b) || b[i] != ':' {
			return u, 0, false
		}
		i++
		if b[i] == ' ' && i+1 < len(b) {
			i++
		}
		value, length := 0, 0
		switch {
		case b[i] == '{' && outer:
			details, n, ok := numbers(b[i+1:], false)
			if !ok {
				return u, 0, false
			}
			length = n + 1
			if string(key) == "prompt_tokens_details" || string(key) == "input_tokens_details" {
				u.Cached = details.Cached
			}
		case bytes.HasPrefix(b[i:], []byte("null")):
			length = len("null")
		default:
			for ; i+length < len(b) && '0' <= b[i+length] && b[i+length] <= '9' && length < 16; length++ {
				value = value*10 + int(b[i+length]-'0')
			}
			u.note(key, value)
		}
		if i += length; length == 0 || i >= len(b) || b[i] != ',' && b[i] != '}' {
			return u, 0, false
		}
		if b[i] == ',' {
			if i++; i < len(b) && b[i] == ' ' {
				i++
			}
			if i < len(b) && b[i] == '}' {
				return u, 0, false
			}
		}
	}
	return u, 0, false
}

// note takes a number by its name.
func (u *usage) note(key []byte, n int) {
	switch string(key) {
	case "prompt_tokens", "input_tokens":
		u.Prompt = n
	case "completion_tokens", "output_tokens":
		u.Completion = n
	case "cached_tokens":
		u.Cached = n
	}
}

// lastObject tells whether b is what follows the last object of an answer: further members without objects, lists or strings with such
// in them, and one brace.
func lastObject(b []byte) bool {
	for i, c := range b {
		switch c {
		case '}':
			return len(bytes.TrimSpace(b[i+1:])) == 0
		case '{', '[', ']', '\\':
			return false
		}
	}
	return false
}

func (u *usage) read(v gjson.Result) {
	if !v.IsObject() {
		return
	}
	u.known = true
	v.ForEach(func(key, value gjson.Result) bool {
		switch key.Str {
		case "prompt_tokens", "input_tokens":
			u.Prompt = int(value.Int())
		case "completion_tokens", "output_tokens":
			u.Completion = int(value.Int())
		case "cached_tokens":
			u.Cached = int(value.Int())
		case "prompt_tokens_details", "input_tokens_details":
			u.Cached = int(value.Get("cached_tokens").Int())
		}
		return true
	})
}
