package openai

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"strconv"
)

// Finish reasons.
const (
	FinishStop   = "stop"
	FinishLength = "length"
)

// Done is the event that ends a stream for a client.
const Done = "data: [DONE]\n\n"

// Usage is what a request cost. Cached is the part of Prompt that was found in the prefix cache.
type Usage struct {
	Prompt, Completion, Cached int
}

// Add counts another choice of the same request: the prompt, and what was cached of it, are the first choice's.
func (u *Usage) Add(choice int, other Usage) {
	if choice == 0 {
		u.Prompt, u.Cached = other.Prompt, other.Cached
	}
	u.Completion += other.Completion
}

// AppendJSON appends the usage object.
func (u Usage) AppendJSON(dst []byte) []byte {
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Prompt), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Completion), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Prompt+u.Completion), 10)
	dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Cached), 10)
	return append(dst, `}}`...)
}

// NewID makes a fresh response id with the endpoint's prefix.
func NewID(ep Endpoint) string {
	var b [16]byte // must differ from others, and is no secret
	binary.LittleEndian.PutUint64(b[:], rand.Uint64())
	binary.LittleEndian.PutUint64(b[8:], rand.Uint64())
	room := make([]byte, 0, len("chatcmpl-")+2*len(b))
	if ep == Completions {
		room = append(room, "cmpl-"...)
	} else {
		room = append(room, "chatcmpl-"...)
	}
	return string(hex.AppendEncode(room, b[:]))
}

// Head is what all chunks of a choice share. It renders both the chunks and the whole response.
type Head struct {
	Endpoint Endpoint
	ID       string
	Created  int64
	Model    string
	Index    int // of the choice; the whole response numbers its choices itself
}

func (h *Head) appendHead(dst []byte, object string) []byte {
	dst = append(dst, `{"id":`...)
	dst = AppendString(dst, h.ID)
	dst = append(dst, `,"object":"`...)
	dst = append(dst, object...)
	dst = append(dst, `","created":`...)
	dst = strconv.AppendInt(dst, h.Created, 10)
	dst = append(dst, `,"model":`...)
	return AppendString(dst, h.Model)
}

func (h *Head) appendChunkHead(dst []byte) []byte {
	dst = append(dst, "data: "...)
	if h.Endpoint == Completions {
		return h.appendHead(dst, "text_completion")
	}
	return h.appendHead(dst, "chat.completion.chunk")
}

// appendChoice begins the choices and the only one of a chunk.
func (h *Head) appendChoice(dst []byte) []byte {
	dst = append(dst, `,"choices":[{"index":`...)
	return strconv.AppendInt(dst, int64(h.Index), 10)
}

// AppendRole appends a chat's first event. promptIDs, when not nil, are shown as vLLM's prompt_token_ids.
// Completions have no such event: nothing is appended for them.
func (h *Head) AppendRole(dst []byte, promptIDs []int32) []byte {
	if h.Endpoint == Completions {
		return dst
	}
	dst = h.appendChunkHead(dst)
	if promptIDs != nil {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = appendInts(dst, promptIDs)
	}
	dst = h.appendChoice(dst)
	return append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

// appendText begins a chunk with text, up to the finish reason's value.
func (h *Head) appendText(dst, text []byte, lp *Logprobs) []byte {
	dst = h.appendChunkHead(dst)
	dst = h.appendChoice(dst)
	switch {
	case h.Endpoint == Completions:
		dst = append(dst, `,"text":`...)
		dst = AppendString(dst, text)
	case text == nil:
		dst = append(dst, `,"delta":{}`...)
	default:
		dst = append(dst, `,"delta":{"content":`...)
		dst = AppendString(dst, text)
		dst = append(dst, '}')
	}
	dst = append(dst, `,"logprobs":`...)
	dst = lp.appendJSON(dst, h.Endpoint)
	return append(dst, `,"finish_reason":`...)
}

// AppendText appends an event with text. tokenIDs, when not nil, are shown as vLLM's token_ids.
func (h *Head) AppendText(dst, text []byte, tokenIDs []int32, lp *Logprobs) []byte {
	if text == nil {
		text = []byte{}
	}
	dst = append(h.appendText(dst, text, lp), "null"...)
	if tokenIDs != nil {
		dst = append(dst, `,"token_ids":`...)
		dst = appendInts(dst, tokenIDs)
	}
	return append(dst, "}]}\n\n"...)
}

// AppendFinish appends the event with the finish reason, and with the text that was held back until the end.
func (h *Head) AppendFinish(dst, text []byte, reason string) []byte {
	if len(text) == 0 {
		text = nil
	}
	dst = AppendString(h.appendText(dst, text, nil), reason)
	return append(dst, "}]}\n\n"...)
}

// AppendUsage appends the event with the usage, which has no choices.
func (h *Head) AppendUsage(dst []byte, u Usage) []byte {
	dst = h.appendChunkHead(dst)
	dst = append(dst, `,"choices":[],"usage":`...)
	dst = u.AppendJSON(dst)
	return append(dst, "}\n\n"...)
}

// Whole is a response that is not streamed.
type Whole struct {
	Choices   []Choice
	Usage     Usage
	PromptIDs []int32 // shown when not nil
}

// Choice is one answer of a Whole.
type Choice struct {
	Text     []byte
	Finish   string
	TokenIDs []int32 // shown when not nil
	Logprobs Logprobs
}

// At returns choice i, and makes those up to it.
func (w *Whole) At(i int) *Choice {
	for len(w.Choices) <= i {
		w.Choices = append(w.Choices, Choice{})
	}
	return &w.Choices[i]
}

// AppendWhole appends the response body.
func (h *Head) AppendWhole(dst []byte, w *Whole) []byte {
	object := "chat.completion"
	if h.Endpoint == Completions {
		object = "text_completion"
	}
	dst = append(h.appendHead(dst, object), `,"choices":[`...)
	for i := range w.Choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = h.appendWholeChoice(dst, w, i)
	}
	dst = append(dst, `],"usage":`...)
	dst = w.Usage.AppendJSON(dst)
	if w.PromptIDs != nil && h.Endpoint == Chat {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = appendInts(dst, w.PromptIDs)
	}
	return append(dst, '}')
}

func (h *Head) appendWholeChoice(dst []byte, w *Whole, i int) []byte {
	c := &w.Choices[i]
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(i), 10)
	if h.Endpoint == Completions {
		dst = append(dst, `,"text":`...)
		dst = AppendString(dst, c.Text)
	} else {
		dst = append(dst, `,"message":{"role":"assistant","content":`...)
		dst = AppendString(dst, c.Text)
		dst = append(dst, `,"refusal":null}`...)
	}
	dst = append(dst, `,"logprobs":`...)
	dst = c.Logprobs.appendJSON(dst, h.Endpoint)
	dst = append(dst, `,"finish_reason":`...)
	dst = AppendString(dst, c.Finish)
	if c.TokenIDs != nil {
		dst = append(dst, `,"token_ids":`...)
		dst = appendInts(dst, c.TokenIDs)
	}
	if w.PromptIDs != nil && h.Endpoint == Completions {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = appendInts(dst, w.PromptIDs)
	}
	return append(dst, '}')
}

// Model is an entry of the models list.
type Model struct {
	ID         string
	Created    int64
	ContextLen int // max_model_len, as vLLM shows it
}

// AppendModel appends one model object.
func AppendModel(dst []byte, m Model) []byte {
	dst = append(dst, `{"id":`...)
	dst = AppendString(dst, m.ID)
	dst = append(dst, `,"object":"model","created":`...)
	dst = strconv.AppendInt(dst, m.Created, 10)
	dst = append(dst, `,"owned_by":"headrace","root":`...)
	dst = AppendString(dst, m.ID)
	dst = append(dst, `,"parent":null,"max_model_len":`...)
	dst = strconv.AppendInt(dst, int64(m.ContextLen), 10)
	return append(dst, '}')
}

// AppendModels appends the list of models.
func AppendModels(dst []byte, models []Model) []byte {
	dst = append(dst, `{"object":"list","data":[`...)
	for i, m := range models {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = AppendModel(dst, m)
	}
	return append(dst, "]}"...)
}
