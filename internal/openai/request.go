package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
)

// Limits of a request. Bodies are bounded by whoever reads them.
const (
	StopMax         = 16
	StopBytesMax    = 256
	StopTokensMax   = 64
	MessagesMax     = 4096
	PromptTokensMax = 1 << 20
	ChoicesMax      = 128
	LogprobsMax     = 20
	BiasesMax       = 1024
	modelBytesMax   = 256
)

// DefaultCompletionTokens is max_tokens of /v1/completions when the client names none, as in OpenAI's and vLLM's.
const DefaultCompletionTokens = 16

// Endpoint says which of the two generating endpoints a request is for.
type Endpoint uint8

// The endpoints.
const (
	Chat Endpoint = iota
	Completions
)

// EndpointOf maps a path to its endpoint.
func EndpointOf(path string) (Endpoint, bool) {
	switch path {
	case "/v1/chat/completions":
		return Chat, true
	case "/v1/completions":
		return Completions, true
	}
	return 0, false
}

func (e Endpoint) String() string {
	if e == Completions {
		return "completions"
	}
	return "chat"
}

// Message is one message of a chat. Text parts are joined by newlines, as vLLM does for templates that want a string.
type Message struct {
	Role       string
	Content    string
	Null       bool // content was absent or null
	Name       string
	ToolCallID string
	ToolCalls  json.RawMessage
}

// Request is a parsed and validated request of either endpoint.
type Request struct {
	Endpoint Endpoint
	Model    string // "" when the client named none

	Messages             []Message // chat
	Tools                json.RawMessage
	TemplateArgs         json.RawMessage // chat_template_kwargs
	AddGenerationPrompt  bool
	ContinueFinalMessage bool

	Prompt       string // completions; PromptTokens is used when not nil
	PromptTokens []int32

	MaxTokens   int // 0: the client named none
	Temperature float32
	TopP        float32
	MinP        float32
	TopK        int // 0: off
	Presence    float32
	Frequency   float32
	Repetition  float32 // 1: off
	Bias        map[int32]float32
	Seed        uint64
	HasSeed     bool
	Stop        []string
	StopTokens  []int32
	IgnoreEOS   bool

	N           int  // choices, at least 1
	Logprobs    bool // of every token
	TopLogprobs int
	Echo        bool // completions: the prompt comes before the answer
	PromptOnly  bool // max_tokens was 0, which only goes with Echo

	Stream           bool
	IncludeUsage     bool
	ReturnTokenIDs   bool
	KeepSpecial      bool // skip_special_tokens: false
	AddSpecialTokens bool

	KV *KVParams // the native dialect's part; nil in a client's request
}

// Options say what a parser accepts.
type Options struct {
	// AllowKV takes kv_transfer_params. A router leaves it false: the field is its own.
	AllowKV bool
}

// ParseRequest reads and validates a request body. Unknown fields are ignored; known fields that would change the
// answer and are not offered are refused by name.
func ParseRequest(ep Endpoint, body []byte, o Options) (*Request, *Error) {
	if err := checkJSON(body); err != nil {
		return nil, BadRequest("", CodeInvalidJSON, "Could not parse the JSON body of your request: %v.", err)
	}
	p := parser{opts: o, req: Request{Endpoint: ep, N: 1, Temperature: 1, TopP: 1, Repetition: 1, AddGenerationPrompt: true, AddSpecialTokens: ep == Completions}}
	err := walkObject(body, p.field)
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			return nil, e
		}
		return nil, BadRequest("", CodeInvalidJSON, "Could not parse the JSON body of your request: %v.", err)
	}
	if e := p.finish(); e != nil {
		return nil, e
	}
	return &p.req, nil
}

type parser struct {
	opts      Options
	req       Request
	hasPrompt bool
	newMax    bool // max_completion_tokens was seen: it wins over max_tokens
	badChoice bool // tool_choice asks for a call
	bestOf    int64
	top       bool // top_logprobs was given, and not 0
}

// field handles one member. Later duplicates win, as in Python and Go.
func (p *parser) field(f field) error {
	set, known := fieldSetters[f.key]
	if !known || (isNull(f.value) && f.key != "prompt") {
		return nil
	}
	err := set(p, f.value)
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return BadRequest(f.key, CodeInvalidValue, "Invalid value for '%s': %v.", f.key, err)
}

func (p *parser) finish() *Error {
	r := &p.req
	if e := p.finishOutput(); e != nil {
		return e
	}
	if r.Endpoint == Chat {
		if len(r.Messages) == 0 {
			return BadRequest("messages", CodeInvalidValue, "'messages' must be an array with at least one message.")
		}
		if r.ContinueFinalMessage && r.AddGenerationPrompt {
			r.AddGenerationPrompt = false
		}
		if p.badChoice && r.Tools != nil {
			return Unsupported("tool_choice", "This server does not force tool calls: 'tool_choice' can be 'none' or 'auto'.")
		}
	} else if !p.hasPrompt {
		return BadRequest("prompt", CodeInvalidValue, "You must provide a 'prompt'.")
	}
	return nil
}

// finishOutput checks what several fields together say about the answer.
func (p *parser) finishOutput() *Error {
	r := &p.req
	switch {
	case p.bestOf != 0 && p.bestOf != int64(r.N):
		return Unsupported("best_of", "This server returns every choice that it makes: 'best_of' can only be equal to 'n', which is %d.", r.N)
	case r.Echo && r.Endpoint == Chat:
		return Unsupported("echo", "'echo' is for /v1/completions.")
	case r.PromptOnly && !r.Echo:
		return BadRequest("max_tokens", CodeInvalidValue, "Invalid value for 'max_tokens': must be at least 1, or 0 together with 'echo'.")
	case p.top && r.Endpoint == Completions:
		return Unsupported("top_logprobs", "'top_logprobs' is for chats: give 'logprobs' a number.")
	case p.top && !r.Logprobs:
		return BadRequest("top_logprobs", CodeInvalidValue, "'top_logprobs' is only allowed together with 'logprobs': true.")
	}
	if !r.Logprobs {
		r.TopLogprobs = 0
	}
	return nil
}

// fieldSetters is every field that means something here. What is absent is ignored.
var fieldSetters = map[string]func(*parser, []byte) error{
	"model":                  setModel,
	"messages":               setMessages,
	"prompt":                 setPrompt,
	"tools":                  setTools,
	"tool_choice":            setToolChoice,
	"chat_template_kwargs":   setTemplateArgs,
	"add_generation_prompt":  setBool(func(r *Request) *bool { return &r.AddGenerationPrompt }),
	"continue_final_message": setBool(func(r *Request) *bool { return &r.ContinueFinalMessage }),
	"add_special_tokens":     setBool(func(r *Request) *bool { return &r.AddSpecialTokens }),
	"max_tokens":             setMaxTokens(false),
	"max_completion_tokens":  setMaxTokens(true),
	"temperature":            setTemperature,
	"top_p":                  setTopP,
	"top_k":                  setTopK,
	"min_p":                  setFloat(0, 1, "must be between 0 and 1", func(r *Request) *float32 { return &r.MinP }),
	"presence_penalty":       setFloat(-2, 2, "must be between -2 and 2", func(r *Request) *float32 { return &r.Presence }),
	"frequency_penalty":      setFloat(-2, 2, "must be between -2 and 2", func(r *Request) *float32 { return &r.Frequency }),
	"repetition_penalty":     setFloat(math.SmallestNonzeroFloat32, 100, "must be over 0 and at most 100", func(r *Request) *float32 { return &r.Repetition }),
	"logit_bias":             setBias,
	"n":                      setN,
	"best_of":                setBestOf,
	"logprobs":               setLogprobs,
	"top_logprobs":           setTopLogprobs,
	"echo":                   setBool(func(r *Request) *bool { return &r.Echo }),
	"seed":                   setSeed,
	"stop":                   setStop,
	"stop_token_ids":         setStopTokens,
	"ignore_eos":             setBool(func(r *Request) *bool { return &r.IgnoreEOS }),
	"stream":                 setBool(func(r *Request) *bool { return &r.Stream }),
	"stream_options":         setStreamOptions,
	"return_token_ids":       setBool(func(r *Request) *bool { return &r.ReturnTokenIDs }),
	"skip_special_tokens":    setSkipSpecial,
	"kv_transfer_params":     setKV,

	"min_tokens":                 onlyInt("min_tokens", 0),
	"prompt_logprobs":            refuse("prompt_logprobs"),
	"bad_words":                  onlyEmpty("bad_words"),
	"use_beam_search":            onlyFalse("use_beam_search"),
	"include_stop_str_in_output": onlyFalse("include_stop_str_in_output"),
	"suffix":                     onlyEmpty("suffix"),
	"functions":                  onlyEmpty("functions"),
	"modalities":                 setModalities,
	"audio":                      refuse("audio"),
	"response_format":            setResponseFormat,
	"guided_json":                refuse("guided_json"),
	"guided_regex":               refuse("guided_regex"),
	"guided_choice":              refuse("guided_choice"),
	"guided_grammar":             refuse("guided_grammar"),
	"structured_outputs":         refuse("structured_outputs"),
	"documents":                  onlyEmpty("documents"),
	"chat_template":              refuse("chat_template"),
	"prompt_embeds":              refuse("prompt_embeds"),
}

func setModel(p *parser, v []byte) (err error) {
	if p.req.Model, err = unquote(v); err == nil && len(p.req.Model) > modelBytesMax {
		err = fmt.Errorf("longer than %d bytes", modelBytesMax)
	}
	return err
}

func setPrompt(p *parser, v []byte) error {
	p.req.Prompt, p.req.PromptTokens, p.hasPrompt = "", nil, true
	switch v[0] {
	case '"':
		s, err := unquote(v)
		p.req.Prompt = s
		return err
	case '[':
		return p.promptArray(v)
	}
	return errors.New("must be a string, an array with one string, or an array of token ids")
}

func (p *parser) promptArray(v []byte) error {
	n := 0
	var first []byte
	_ = walkArray(v, func(e []byte) error {
		if n++; n == 1 {
			first = e
		}
		return nil
	})
	if n == 0 {
		return errors.New("must not be empty")
	}
	if first[0] != '"' && first[0] != '[' {
		ids, err := parseTokens(v, PromptTokensMax)
		p.req.PromptTokens = ids
		return err
	}
	if n > 1 {
		return Unsupported("prompt", "This server takes one prompt a request; send %d requests instead.", n)
	}
	if first[0] == '[' {
		ids, err := parseTokens(first, PromptTokensMax)
		if err == nil && len(ids) == 0 {
			err = errors.New("must not be empty")
		}
		p.req.PromptTokens = ids
		return err
	}
	s, err := unquote(first)
	p.req.Prompt = s
	return err
}

func setMessages(p *parser, v []byte) error {
	p.req.Messages = nil
	return walkArray(v, func(e []byte) error {
		i := len(p.req.Messages)
		if i >= MessagesMax {
			return fmt.Errorf("must have at most %d messages", MessagesMax)
		}
		m, err := parseMessage(e, i)
		p.req.Messages = append(p.req.Messages, m)
		return err
	})
}

func parseMessage(v []byte, i int) (Message, error) {
	m := Message{Null: true}
	param := fmt.Sprintf("messages[%d]", i)
	err := walkObject(v, func(f field) (err error) {
		if isNull(f.value) {
			return nil
		}
		switch f.key {
		case "role":
			m.Role, err = unquote(f.value)
		case "name":
			m.Name, err = unquote(f.value)
		case "tool_call_id":
			m.ToolCallID, err = unquote(f.value)
		case "tool_calls":
			if f.value[0] != '[' {
				err = errors.New("must be an array")
			}
			m.ToolCalls = f.value
		case "content":
			m.Null = false
			m.Content, err = parseContent(f.value, param+".content")
		}
		var e *Error
		if err != nil && !errors.As(err, &e) {
			err = BadRequest(param+"."+f.key, CodeInvalidValue, "Invalid value for '%s.%s': %v.", param, f.key, err)
		}
		return err
	})
	if errors.Is(err, errNotObject) {
		return m, BadRequest(param, CodeInvalidValue, "Invalid value for '%s': must be an object.", param)
	}
	if err == nil && m.Role == "" {
		err = BadRequest(param+".role", CodeInvalidValue, "Missing required parameter: '%s.role'.", param)
	}
	if err == nil && m.Null && m.ToolCalls == nil && m.Role != "assistant" {
		err = BadRequest(param+".content", CodeInvalidValue, "Missing required parameter: '%s.content'.", param)
	}
	return m, err
}

func parseContent(v []byte, param string) (string, error) {
	if v[0] == '"' {
		return unquote(v)
	}
	if v[0] != '[' {
		return "", errors.New("must be a string or an array of text parts")
	}
	var texts []string
	i := 0
	err := walkArray(v, func(e []byte) error {
		text, err := parsePart(e, fmt.Sprintf("%s[%d]", param, i))
		texts = append(texts, text)
		i++
		return err
	})
	return strings.Join(texts, "\n"), err
}

func parsePart(v []byte, param string) (string, error) {
	if v[0] == '"' { // vLLM takes bare strings as parts
		return unquote(v)
	}
	var kind, text string
	hasText := false
	err := walkObject(v, func(f field) (err error) {
		switch f.key {
		case "type":
			kind, err = unquote(f.value)
		case "text", "refusal":
			hasText = true
			text, err = unquote(f.value)
		}
		if err != nil {
			return BadRequest(param+"."+f.key, CodeInvalidValue, "Invalid value for '%s.%s': %v.", param, f.key, err)
		}
		return nil
	})
	if errors.Is(err, errNotObject) {
		err = BadRequest(param, CodeInvalidValue, "Invalid value for '%s': must be an object.", param)
	}
	if err != nil {
		return "", err
	}
	if kind != "text" && kind != "refusal" {
		return "", Unsupported(param+".type", "Invalid value for '%s.type': this model takes text only, not parts of type %q.", param, kind)
	}
	if !hasText {
		return "", BadRequest(param+".text", CodeInvalidValue, "Missing required parameter: '%s.text'.", param)
	}
	return text, nil
}
