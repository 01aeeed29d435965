package tokenize

import (
	"encoding/json"
	"strings"
	"sync"

	"github.com/headrace/headrace/internal/chat"
)

// The new messages of a conversation are rendered behind a stub: a short conversation of the same shape whose texts are a
// marker. What the template writes behind the stub's own text is what it writes behind that of the conversation, because
// it depends on the shape alone: were it to depend on a text, the marker would show in it. Where the stub's text is not
// the beginning of what is rendered (a template that looks ahead), the node is of no use and the whole conversation is
// rendered. How well this holds is tried on conversations of many shapes when a model is loaded (probe), and again on
// some requests as they come (checkEvery).

// marker is the text of every stub. No template changes letters.
const marker = "Qz7Xk0stub"

// stubTools stand for the tools of a request: templates write them before the messages, or the marker shows.
var stubTools = json.RawMessage(`[{"type":"function","function":{"name":"` + marker + `","description":"` + marker + `","parameters":{"type":"object","properties":{}}}}]`)

// stubText is a rendered stub, and what a generation prompt adds to it.
type stubText struct {
	text, prompt string
	ok           bool
}

// stubs remembers rendered stubs. There are a few for each way of using a template.
type stubs struct {
	mu    sync.Mutex
	texts map[string]stubText
	bytes int
}

const stubsBytesMax = 8 << 20

func (s *stubs) get(name []byte) (stubText, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, ok := s.texts[string(name)]
	return text, ok
}

func (s *stubs) put(name []byte, text stubText) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += len(name) + len(text.text) + len(text.prompt) + 64
	if s.texts == nil || s.bytes > stubsBytesMax {
		s.texts, s.bytes = map[string]stubText{}, 0
	}
	s.texts[string(name)] = text
}

// appendName appends what a stub is remembered by.
func appendName(dst []byte, in *chat.Input, day string, stub []kind) []byte {
	dst = append(append(append(dst, in.Args...), 0), day...)
	dst = append(dst, 0, bit(in.Tools != nil))
	for _, k := range stub {
		dst = append(append(dst, k.role...), 0, k.content, k.calls, bit(k.reasoning)|bit(k.name)<<1)
	}
	return dst
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// stubOf renders a stub, or remembers it. dst is memory for its name.
func (t *Tokenizer) stubOf(in chat.Input, day string, stub []kind, dst []byte) stubText {
	name := appendName(dst, &in, day, stub)
	if text, ok := t.stubs.get(name); ok {
		return text
	}
	if in.Tools != nil {
		in.Tools = stubTools
	}
	in.Conversation = append(t.appendStub([]byte{'['}, stub), ']')
	var text stubText
	whole, err := t.render(in)
	if err == nil {
		in.AddGenerationPrompt = true
		var asked string
		if asked, err = t.render(in); err == nil && strings.HasPrefix(asked, whole) {
			text = stubText{text: whole, prompt: asked[len(whole):], ok: true}
		}
	}
	t.stubs.put(name, text)
	return text
}

// appendStub appends the messages of a stub, with a comma between them.
func (t *Tokenizer) appendStub(dst []byte, stub []kind) []byte {
	for i, k := range stub {
		if i > 0 {
			dst = append(dst, ',')
		}
		role, err := json.Marshal(k.role)
		if err != nil {
			role = []byte(`""`)
		}
		dst = append(append(append(dst, `{"role":`...), role...), `,"content":`...)
		text := `""`
		if k.content == contentText {
			text = `"` + marker + `"`
		}
		switch parts := t.parts && t.engine == EngineVLLM && k.role != "tool"; {
		case k.content == contentNone && t.engine == EngineNative:
			dst = append(dst, "null"...)
		case k.content == contentNone && parts:
			dst = append(dst, "[]"...)
		case parts:
			dst = append(append(append(dst, `[{"type":"text","text":`...), text...), "}]"...)
		default:
			dst = append(dst, text...)
		}
		if k.name {
			dst = append(dst, `,"name":"`+marker+`"`...)
		}
		if k.reasoning {
			dst = append(dst, `,"reasoning":"`+marker+`","reasoning_content":"`+marker+`"`...)
		}
		if k.role == "tool" {
			dst = append(dst, `,"tool_call_id":"`+marker+`"`...)
		}
		const call = `{"id":"` + marker + `","function":{"arguments":{"` + marker + `":"` + marker + `"},"name":"` + marker + `"},"type":"function"}`
		switch k.calls {
		case 1:
			dst = append(dst, `,"tool_calls":[`+call+`]`...)
		case 2:
			dst = append(dst, `,"tool_calls":[`+call+`,`+call+`]`...)
		}
		dst = append(dst, '}')
	}
	return dst
}

// behind renders messages behind the stub of those before them: what the template writes for them, with the generation
// prompt where one is asked for. ok is false where that cannot be told from a stub.
func (t *Tokenizer) behind(in chat.Input, day string, stub []kind, messages []byte, generate bool, s *scratch) (text string, ok bool) {
	before := t.stubOf(in, day, stub, s.name[:0])
	if !before.ok {
		return "", false
	}
	if in.Tools != nil {
		in.Tools = stubTools
	}
	s.window = append(t.appendStub(append(s.window[:0], '['), stub), ',')
	s.window = append(append(s.window, messages...), ']')
	in.Conversation, in.AddGenerationPrompt = s.window, generate
	whole, err := t.render(in)
	if err != nil || !strings.HasPrefix(whole, before.text) {
		return "", false
	}
	text = whole[len(before.text):]
	return text, !strings.Contains(text, marker)
}

// dates are the fields of strftime that change within a day.
var dates = []string{"%H", "%I", "%M", "%S", "%f", "%p", "%c", "%X", "%T", "%R", "%r", "%s"}

// cacheable tells whether a template's output depends on nothing but the request and the day.
func cacheable(source string) bool {
	if !strings.Contains(source, "strftime_now") {
		return true
	}
	for _, d := range dates {
		if strings.Contains(source, d) {
			return false
		}
	}
	return true
}
