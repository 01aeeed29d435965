package dialects

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
)

// wants are what matters of a request where its answer is to be gone on with by another engine.
type wants struct {
	chat bool
	// never says why nobody can go on; retell why the answer must be told again from its beginning, because an engine that gets
	// the tokens so far as a prompt goes on otherwise. Both are "" as a rule.
	never, retell string
	// fixed: told again it is the same answer, because nothing is drawn, or by the client's own seed.
	fixed bool
	ids   bool // the client asked for token ids
	logs  bool // a completion's log probabilities
	usage bool
	// stop is how many characters the longest stop string has, stopShown that they are part of the answer.
	stop      int
	stopShown bool

	maxTokens, minTokens int64 // -1: not given
}

// wantsOf reads a request. It is on the way of each one, so it goes over the members once.
func wantsOf(path string, b *body.Body) (w wants) {
	w.maxTokens, w.minTokens = -1, -1
	e, ok := openai.EndpointOf(path)
	switch {
	case !ok:
		w.never = "only completions and chats can be moved"
		return w
	case b.N > 1:
		w.never = "several answers"
	}
	w.chat, w.usage = e == openai.Chat, b.IncludeUsage
	chatMax, greedy, seeded := int64(-1), false, false
	b.Each(func(name, v []byte) {
		if string(v) == "null" {
			return
		}
		switch string(name) {
		case "max_tokens":
			w.maxTokens = integer(v)
		case "max_completion_tokens":
			chatMax = integer(v)
		case "min_tokens":
			w.minTokens = integer(v)
		case "temperature":
			greedy = zero(v)
		case "seed":
			seeded = true
		case "top_k":
			greedy = greedy || string(v) == "1"
		case "return_token_ids":
			w.ids = string(v) == "true"
		case "stop":
			w.stop = longest(v)
		case "include_stop_str_in_output":
			w.stopShown = string(v) == "true"
		case "logprobs":
			w.logs = string(v) != "false"
		default:
			w.oddities(name, v)
		}
	})
	if w.chat && chatMax >= 0 {
		w.maxTokens = chatMax
	}
	switch {
	case w.chat && w.logs:
		w.logs, w.retell = false, "log probabilities of a chat"
	case seeded && !greedy && w.retell == "":
		w.retell = "a seed" // an engine draws by it from the beginning
	}
	w.fixed = greedy || seeded
	return w
}

// oddities are what keeps an answer from being moved, or from being gone on with from its tokens.
func (w *wants) oddities(name, v []byte) {
	switch string(name) {
	case "use_beam_search":
		if string(v) == "true" {
			w.never = "beam search"
		}
	case "prompt":
		if body.Batch(v) > 0 {
			w.never = "several prompts"
		}
	case "echo":
		if string(v) == "true" {
			w.retell = "echo"
		}
	case "tools", "functions", "bad_words": // whose parser, or filter, has seen the answer so far
		if len(v) > 2 {
			w.retell = string(name)
		}
	case "presence_penalty", "frequency_penalty": // count the answer's tokens, not the prompt's
		if !zero(v) {
			w.retell = string(name)
		}
	case "include_reasoning":
		if string(v) == "false" {
			w.retell = "hidden reasoning"
		}
	case "response_format":
		if kind := gjson.GetBytes(v, "type").String(); kind != "text" && kind != "" {
			w.retell = "response_format"
		}
	case "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
		"thinking_token_budget", "repetition_detection", "watermarking", "prompt_logprobs", "prompt_embeds", "suffix", "logits_processors", "vllm_xargs":
		w.retell = string(name)
	}
}

// integer reads a number of tokens, -1 for what is none.
func integer(v []byte) int64 {
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

func zero(v []byte) bool { return len(v) > 0 && len(bytes.Trim(v, "0.")) == 0 }

// longest is how many characters the longest of some strings has, or the one string.
func longest(v []byte) (n int) {
	r := gjson.ParseBytes(v)
	if r.Type == gjson.String {
		return utf8.RuneCountInString(r.String())
	}
	r.ForEach(func(_, s gjson.Result) bool {
		n = max(n, utf8.RuneCountInString(s.String()))
		return true
	})
	return n
}

// notContinued are the members of a request that its continuation does without: it has the whole prompt as token ids, so that
// nothing is rendered, cut or parsed any more, and a seed would draw again what it has drawn.
var notContinued = set("prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "truncate_prompt_tokens", "truncation_side",
	"add_special_tokens", "echo", "suffix", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents", "tools", "tool_choice",
	"functions", "function_call", "reasoning_effort", "include_reasoning", "parallel_tool_calls", "response_format", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text")

// notContinuedChat are those of a chat, whose log probabilities have another shape.
var notContinuedChat = set("logprobs", "top_logprobs")

func init() {
	for name := range notContinued {
		notContinuedChat[name] = true
	}
}

// textOnly tells whether a chat's messages are made of text: what stands in a prompt for an image cannot be a prompt.
func textOnly(messages []byte) bool {
	plain := true
	gjson.ParseBytes(messages).ForEach(func(_, m gjson.Result) bool {
		m.Get("content").ForEach(func(_, part gjson.Result) bool {
			if kind := part.Get("type").String(); part.IsObject() && kind != "text" && kind != "" {
				plain = false
			}
			return plain
		})
		return plain
	})
	return plain
}

// Memory is what is remembered of a stream, so that another engine can go on with it.
type Memory uint8

// Memories.
const (
	Nothing Memory = iota
	// Text: what the client has seen. The answer can be told again, if nothing in it is drawn, up to where it is new.
	Text
	// Tokens: also which tokens it is made of, which the engine is asked for. It can be gone on with.
	Tokens
)

// DefaultMigration has what is remembered by dialect. Plain servers are asked for nothing that they may not know.
func DefaultMigration() map[string]Memory {
	return map[string]Memory{VLLMName: Tokens, NixlName: Tokens, NixlPushName: Tokens, MooncakeName: Tokens, NCCLName: Tokens, SGLangName: Text, PlainName: Text}
}

// ParseMigration reads a list such as vllm,openai=tokens: dialects, and what is remembered where it is not the default. "default"
// stands for all, "none" for none.
func ParseMigration(list string) (map[string]Memory, error) {
	all := DefaultMigration()
	out := map[string]Memory{}
	for item := range strings.SplitSeq(list, ",") {
		name, kind, given := strings.Cut(strings.TrimSpace(item), "=")
		of, known := all[name]
		switch {
		case name == "none" && !given && list == item:
			return out, nil
		case name == "default" && !given:
			for name, of := range all {
				out[name] = of
			}
			continue
		case !known:
			return nil, fmt.Errorf("migrate %q: want none, default, or dialects such as %s,%s=tokens", item, VLLMName, PlainName)
		case given && kind == "tokens":
			of = Tokens
		case given && kind == "text":
			of = Text
		case given:
			return nil, fmt.Errorf("migrate %q: what is remembered is tokens or text", item)
		}
		if of == Tokens && name == SGLangName {
			return nil, fmt.Errorf("migrate %q: SGLang's streams do not say their tokens, text is what can be remembered", item)
		}
		out[name] = of
	}
	return out, nil
}
