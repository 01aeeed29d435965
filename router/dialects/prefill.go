package dialects

import (
	"fmt"

	"github.com/tidwall/gjson"

	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/router/body"
)

// aboutTheAnswer has the members of a request that concern how the answer's tokens are drawn and shown. A worker that only
// prefills goes without them: some are refused beside max_tokens 1 or without a stream, and the others cost something
// and give nothing (penalties count the prompt's tokens, grammars are compiled, log probabilities are sorted).
//
// Whatever may change the prompt stays: tools, tool_choice, reasoning_effort, documents, the template and its arguments,
// a chat's response_format, which templates may show to the model, and all that is not known here.
var aboutTheAnswer = set(
	"stream", "stream_options", "stream_interval", "max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens",
	"n", "best_of", "use_beam_search", "length_penalty", "repetition_detection", "thinking_token_budget",
	"logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text",
	"return_token_offsets", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
	"temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "bad_words",
	"presence_penalty", "frequency_penalty", "repetition_penalty", "watermarking", "echo",
	"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
)

// responsesOnly is aboutTheAnswer of a response, which has other names for some of it, and is kept by its engine unless it is
// asked not to. request_id is the router's own.
var responsesOnly = set("max_output_tokens", "store", "background", "include", "request_id", "metadata")

// completionsOnly is aboutTheAnswer where there is no template.
var completionsOnly = set("response_format")

func set(lists ...string) map[string]bool {
	m := make(map[string]bool, len(lists))
	for _, s := range lists {
		m[s] = true
	}
	return m
}

func init() {
	for name := range aboutTheAnswer {
		completionsOnly[name], responsesOnly[name] = true, true
	}
}

// prefillBody is the client's request for one token that nobody looks at, with transfer parameters kv, nil for none. id, when
// there is one, is what vLLM must call it.
func prefillBody(q *Request, id string, kv []byte) [][]byte {
	drop := aboutTheAnswer
	if e, ok := openai.EndpointOf(q.Path); ok && e == openai.Completions {
		drop = completionsOnly
	}
	added := `"stream":false,"temperature":0,"max_tokens":1`
	if q.Path == PathResponses {
		drop, added = responsesOnly, `"stream":false,"store":false,"temperature":0,"max_output_tokens":1`
		if id != "" {
			added += `,"request_id":"` + id + `"`
		}
	} else if q.Body.Value("max_completion_tokens") != nil {
		added += `,"max_completion_tokens":1`
	}
	if kv == nil {
		return q.Body.Without(drop, []byte(added))
	}
	return q.Body.Without(drop, withParams(added+",", kv))
}

// withParams appends kv_transfer_params to members.
func withParams(members string, kv []byte) []byte {
	return append(append([]byte(members), `"kv_transfer_params":`...), kv...)
}

// Unpaired says why workers of a dialect cannot share a request, "" if they can.
func Unpaired(dialect string, b *body.Body) string {
	if dialect == NativeName {
		return "" // which serves all of these by itself
	}
	is := func(name, value string) bool { return string(b.Value(name)) == value }
	switch {
	case dialect == PlainName:
		return "workers without a connector"
	case dialect == SGLangName: // whose own router shares all of these
		if n := rooms(b); n > roomsMax {
			return fmt.Sprintf("%d answers to one request, at most %d", n, roomsMax)
		}
		return ""
	case b.N > 1 && (dialect == NCCLName || dialect == NixlPushName || dialect == MooncakeName):
		return "several choices" // decode makes requests of other ids of them, for which prefill has nothing
	case b.Prompts() > 1:
		return "several prompts"
	case b.Value("prompt_embeds") != nil:
		return "prompt_embeds" // no token ids that both could compare
	case b.Value("prompt_logprobs") != nil:
		return "prompt_logprobs" // are of the prompt's logits, which decode does not compute
	case b.Value("echo") != nil && !is("echo", "false"):
		return "echo" // the same, with log probabilities
	case b.Value("use_beam_search") != nil && !is("use_beam_search", "false"):
		return "beam search" // is many requests to the engine, none of which takes a ticket
	case b.Value("truncate_prompt_tokens") != nil && b.Value("truncate_prompt_tokens")[0] == '-':
		return "truncate_prompt_tokens" // -1 is what max_tokens leaves, and prefill's is 1
	}
	return responsesUnpaired(b)
}

// responsesUnpaired says why a response is one engine's: it goes on from what that one keeps, or is asked for several times
// with the same transfer parameters, the engine calling tools in between.
func responsesUnpaired(b *body.Body) string {
	if b.Value("input") == nil {
		return ""
	}
	switch {
	case b.Value("previous_response_id") != nil:
		return "previous_response_id"
	case string(b.Value("background")) == "true":
		return "background"
	}
	why := ""
	gjson.ParseBytes(b.Value("tools")).ForEach(func(_, tool gjson.Result) bool {
		if tool.Get("type").String() != "function" {
			why = "tools that the engine calls"
		}
		return why == ""
	})
	return why
}
