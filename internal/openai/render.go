package openai

import (
	"crypto/rand"
	"encoding/hex"
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
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails
	prefix := "chatcmpl-"
	if ep == Completions {
		prefix = "cmpl-"
	}
	return prefix + hex.EncodeToString(b[:])
}

// Head is what all chunks of a response share. It renders both the chunks and the whole response.
type Head struct {
	Endpoint Endpoint
	ID       string
	Created  int64
	Model    string
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
	return append(dst, `,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

// AppendText appends an event with text. tokenIDs, when not nil, are shown as vLLM's token_ids.
func (h *Head) AppendText(dst, text []byte, tokenIDs []int32) []byte {
	dst = h.appendChunkHead(dst)
	if h.Endpoint == Completions {
		dst = append(dst, `,"choices":[{"index":0,"text":`...)
		dst = AppendString(dst, text)
		dst = append(dst, `,"logprobs":null,"finish_reason":null`...)
	} else {
		dst = append(dst, `,"choices":[{"index":0,"delta":{"content":`...)
		dst = AppendString(dst, text)
		dst = append(dst, `},"logprobs":null,"finish_reason":null`...)
	}
	if tokenIDs != nil {
		dst = append(dst, `,"token_ids":`...)
		dst = appendInts(dst, tokenIDs)
	}
	return append(dst, "}]}\n\n"...)
}

// AppendFinish appends the event with the finish reason, and with the text that was held back until the end.
func (h *Head) AppendFinish(dst, text []byte, reason string) []byte {
	dst = h.appendChunkHead(dst)
	switch {
	case h.Endpoint == Completions:
		dst = append(dst, `,"choices":[{"index":0,"text":`...)
		dst = AppendString(dst, text)
	case len(text) > 0:
		dst = append(dst, `,"choices":[{"index":0,"delta":{"content":`...)
		dst = AppendString(dst, text)
		dst = append(dst, '}')
	default:
		dst = append(dst, `,"choices":[{"index":0,"delta":{}`...)
	}
	dst = append(dst, `,"logprobs":null,"finish_reason":`...)
	dst = AppendString(dst, reason)
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
	Text      []byte
	Finish    string
	Usage     Usage
	TokenIDs  []int32 // shown when not nil
	PromptIDs []int32 // shown when not nil
}

// AppendWhole appends the response body.
func (h *Head) AppendWhole(dst []byte, w *Whole) []byte {
	if h.Endpoint == Completions {
		dst = h.appendHead(dst, "text_completion")
		dst = append(dst, `,"choices":[{"index":0,"text":`...)
		dst = AppendString(dst, w.Text)
		dst = append(dst, `,"logprobs":null,"finish_reason":`...)
	} else {
		dst = h.appendHead(dst, "chat.completion")
		dst = append(dst, `,"choices":[{"index":0,"message":{"role":"assistant","content":`...)
		dst = AppendString(dst, w.Text)
		dst = append(dst, `,"refusal":null},"logprobs":null,"finish_reason":`...)
	}
	dst = AppendString(dst, w.Finish)
	if w.TokenIDs != nil {
		dst = append(dst, `,"token_ids":`...)
		dst = appendInts(dst, w.TokenIDs)
	}
	if w.PromptIDs != nil && h.Endpoint == Completions {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = appendInts(dst, w.PromptIDs)
	}
	dst = append(dst, `}],"usage":`...)
	dst = w.Usage.AppendJSON(dst)
	if w.PromptIDs != nil && h.Endpoint == Chat {
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
