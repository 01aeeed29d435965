package tokenize

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/headrace/headrace/internal/bpe"
	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/router/tokens"
)

// fields are the members of a request that decide its prompt, as the client wrote them; nil where missing.
type fields struct {
	messages, tools, kwargs, effort []byte
	prompt                          []byte
	generate, proceed, special      []byte
	other                           string // a member that cannot be followed
}

// readFields finds the members of a request. Of one given twice the last counts, as in Python.
func readFields(body []byte) (f fields, err error) {
	err = walkObject(body, func(key, value []byte) error {
		switch string(key) {
		case "messages":
			f.messages = value
		case "tools":
			f.tools = value
		case "chat_template_kwargs":
			f.kwargs = value
		case "reasoning_effort":
			f.effort = value
		case "prompt":
			f.prompt = value
		case "add_generation_prompt":
			f.generate = value
		case "continue_final_message":
			f.proceed = value
		case "add_special_tokens":
			f.special = value
		case "chat_template", "documents", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs", "suffix":
			if !isNull(value) {
				f.other = string(key)
			}
		}
		return nil
	})
	return f, err
}

// scratch is what one AppendPrompt works in.
type scratch struct {
	items  [][]byte
	keys   []key
	kinds  []kind
	json   []byte
	window []byte
	name   []byte
	text   []byte
	ids    []uint32
	parts  []tokens.Part // of tokens in the cache, the last one first

	apart bool          // they are not to be copied
	known []tokens.Part // and are what the prompt begins with
}

// scratchBytesMax is what a pooled scratch may keep.
const scratchBytesMax = 4 << 20

var scratches = sync.Pool{New: func() any { return new(scratch) }}

func (s *scratch) release() {
	clear(s.items) // they lie in the client's body
	clear(s.kinds)
	clear(s.parts)
	s.items, s.json, s.kinds = s.items[:0], s.json[:0], s.kinds[:0]
	s.apart, s.known = false, nil
	if cap(s.json)+cap(s.window)+cap(s.text)+4*cap(s.ids) <= scratchBytesMax {
		scratches.Put(s)
	}
}

// AppendPrompt appends the token ids that the engine will take for the prompt of a request, whose body must be valid
// JSON, to dst. endpoint is the path of the request. The error wraps ErrUnsupported where the tokens cannot be told: dst
// is then as it was. What distinguishes prompts beside their tokens, as cache_salt or a LoRA's name, is the caller's.
func (t *Tokenizer) AppendPrompt(dst []uint32, endpoint string, body []byte) ([]uint32, error) {
	s, _ := scratches.Get().(*scratch)
	defer s.release()
	return t.appendPrompt(dst, endpoint, body, s)
}

// Prompt is AppendPrompt into p, whose parts it replaces. What is known from other prompts is not copied.
func (t *Tokenizer) Prompt(p *tokens.Prompt, endpoint string, body []byte) error {
	s, _ := scratches.Get().(*scratch)
	defer s.release()
	s.apart = true
	own, err := t.appendPrompt(p.Own[:0], endpoint, body, s)
	p.Parts, p.Own = p.Parts[:0], own
	if err != nil {
		return err
	}
	for _, part := range slices.Backward(s.known) {
		p.Parts = append(p.Parts, part)
	}
	p.Parts = append(p.Parts, tokens.Part{IDs: own})
	return nil
}

func (t *Tokenizer) appendPrompt(dst []uint32, endpoint string, body []byte, s *scratch) ([]uint32, error) {
	f, err := readFields(body)
	if err != nil {
		return dst, unsupported("the body: %v", err)
	}
	if f.other != "" {
		return dst, unsupported("a request with %s", f.other)
	}
	start := len(dst)
	switch endpoint {
	case Completions:
		dst, err = t.appendCompletion(dst, &f, s)
	case ChatCompletions:
		dst, err = t.appendChat(dst, &f, s)
	default:
		err = unsupported("the endpoint %.40s", endpoint)
	}
	if err != nil {
		return dst[:start], err
	}
	return dst, nil
}

// flag reads a member that is true or false.
func flag(value []byte, missing bool) (bool, error) {
	switch string(value) {
	case "":
		return missing, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, unsupported("a flag that is %.20s", value)
}

// appendCompletion takes a prompt of text or of token ids, alone or as the only one of a list.
func (t *Tokenizer) appendCompletion(dst []uint32, f *fields, s *scratch) ([]uint32, error) {
	special, err := flag(f.special, true)
	if err != nil {
		return dst, err
	}
	prompt := f.prompt
	for depth := 0; ; depth++ {
		if isString(prompt) {
			text, err := unquote(prompt)
			if err != nil {
				return dst, unsupported("the prompt: %v", err)
			}
			return t.bpe.Encode(dst, text, bpe.Options{Marks: special}), nil
		}
		if s.items, err = appendItems(s.items[:0], prompt); err != nil {
			return dst, unsupported("a prompt that is neither text nor a list")
		}
		if len(s.items) > 0 && s.items[0][0] >= '0' && s.items[0][0] <= '9' {
			break
		}
		if len(s.items) != 1 || depth > 0 {
			return dst, unsupported("%d prompts in one request", len(s.items))
		}
		prompt = s.items[0]
	}
	for _, item := range s.items {
		id, err := strconv.ParseUint(string(item), 10, 32)
		if err != nil {
			return dst, unsupported("a prompt of token ids with %.20s", item)
		}
		dst = append(dst, uint32(id))
	}
	return dst, nil
}

// flags are what of a chat request decides its rendering beside messages and tools.
type flags struct {
	generate, proceed, special bool
}

func readFlags(f *fields) (o flags, err error) {
	if o.generate, err = flag(f.generate, true); err != nil {
		return o, err
	}
	if o.proceed, err = flag(f.proceed, false); err != nil {
		return o, err
	}
	o.special, err = flag(f.special, false)
	if err == nil && o.generate && o.proceed {
		err = unsupported("add_generation_prompt together with continue_final_message")
	}
	return o, err
}

func (t *Tokenizer) appendChat(dst []uint32, f *fields, s *scratch) ([]uint32, error) {
	o, err := readFlags(f)
	if err != nil {
		return dst, err
	}
	if s.items, err = appendItems(s.items[:0], f.messages); err != nil || len(s.items) == 0 {
		return dst, unsupported("a chat without messages")
	}
	in, err := t.input(f)
	if err != nil {
		return dst, err
	}
	if t.cache == nil || t.cache.off.Load() || o.proceed || o.special {
		return t.appendWhole(dst, in, o, s)
	}
	return t.appendCached(dst, f, in, o, s)
}

// appendWhole renders and encodes all of a conversation.
func (t *Tokenizer) appendWhole(dst []uint32, in chat.Input, o flags, s *scratch) ([]uint32, error) {
	text, err := t.renderAll(in, o, s)
	if err != nil {
		return dst, err
	}
	return t.bpe.Encode(dst, text, bpe.Options{Marks: o.special}), nil
}

// input prepares what the template gets beside the messages.
func (t *Tokenizer) input(f *fields) (in chat.Input, err error) {
	if t.template == nil {
		return in, t.missing
	}
	in.Now = t.now()
	if in.Args, err = t.arguments(f); err != nil {
		return in, err
	}
	if isNull(f.tools) {
		return in, nil
	}
	if t.engine == EngineNative {
		in.Tools = f.tools
		return in, nil
	}
	tools, err := appendTools(nil, f.tools)
	if err == nil && (t.tools || t.toolUse != nil) { // other templates do not see them
		in.Tools = tools
	}
	return in, err
}

// arguments are the further variables of the template: chat_template_kwargs, and in vLLM what comes of reasoning_effort.
func (t *Tokenizer) arguments(f *fields) (json.RawMessage, error) {
	var out []byte
	thinks := false
	if !isNull(f.kwargs) {
		out = append(out, f.kwargs...)
		err := walkObject(f.kwargs, func(key, _ []byte) error {
			switch string(key) {
			case "messages", "tools", "documents", "chat_template", "tokenize", "continue_final_message", "add_generation_prompt":
				return unsupported("chat_template_kwargs with %s", key)
			case "enable_thinking":
				thinks = true
			}
			return nil
		})
		if err != nil {
			return nil, unsupported("chat_template_kwargs: %v", err)
		}
	}
	if t.engine != EngineVLLM || isNull(f.effort) {
		return out, nil
	}
	effort := `"reasoning_effort":` + string(f.effort)
	if !thinks {
		effort += `,"enable_thinking":` + strconv.FormatBool(string(f.effort) != `"none"`)
	}
	if out == nil {
		return json.RawMessage("{" + effort + "}"), nil
	}
	closing := strings.LastIndexByte(string(out), '}')
	out = out[:closing]
	if len(out) > 1 && strings.TrimSpace(string(out[1:])) != "" {
		out = append(out, ',')
	}
	return append(append(out, effort...), '}'), nil
}

// renderAll renders the whole conversation.
func (t *Tokenizer) renderAll(in chat.Input, o flags, s *scratch) (string, error) {
	if o.proceed {
		last := len(s.items) - 1
		raw, err := tagged(s.items[last])
		if err != nil {
			return "", err
		}
		s.items[last] = raw
	}
	s.json = append(s.json[:0], '[')
	if err := t.readMessages(s, s.items); err != nil {
		return "", err
	}
	s.json = append(s.json, ']')
	in.Conversation, in.AddGenerationPrompt = s.json, o.generate
	text, err := t.render(in)
	if err != nil || !o.proceed {
		return text, err
	}
	return untagged(text)
}

// readMessages appends what the template gets for messages to s.json, with commas between, and their kinds to s.kinds.
func (t *Tokenizer) readMessages(s *scratch, messages [][]byte) error {
	s.kinds = s.kinds[:0]
	for i, raw := range messages {
		if i > 0 {
			s.json = append(s.json, ',')
		}
		var k kind
		var err error
		if s.json, k, err = t.appendMessage(s.json, raw); err != nil {
			return err
		}
		s.kinds = append(s.kinds, k)
	}
	return nil
}

func (t *Tokenizer) render(in chat.Input) (string, error) {
	template := t.template
	if len(in.Tools) > 0 && t.toolUse != nil {
		template = t.toolUse
	}
	text, err := template.Render(in)
	if err != nil { // the engine will refuse the request
		return "", unsupported("%v", err)
	}
	return text, nil
}

// proceedTag marks where the last message ends when the model is to go on with it. It is transformers' own, so that
// templates that trim or look at the text do with it what they do there.
const proceedTag = "CONTINUE_FINAL_MESSAGE_TAG "

// tagged returns the last message with the tag behind its content.
func tagged(raw []byte) ([]byte, error) {
	var out []byte
	err := walkObject(raw, func(key, value []byte) error {
		if string(key) != "content" {
			return nil
		}
		if !isString(value) {
			return unsupported("continue_final_message of a message that is no string")
		}
		end := cap(raw) - cap(value) + len(value) - 1 // value lies in raw
		out = append(append(append(append([]byte(nil), raw[:end]...), proceedTag...), '"'), raw[end+1:]...)
		return nil
	})
	if err != nil || out == nil {
		return nil, unsupported("continue_final_message of a message without content")
	}
	return out, nil
}

// untagged cuts the rendered text at the tag as transformers does.
func untagged(text string) (string, error) {
	at := strings.LastIndex(text, strings.TrimSpace(proceedTag))
	if at < 0 {
		return "", unsupported("the template drops the end of the final message")
	}
	if strings.HasPrefix(text[at:], proceedTag) {
		return text[:at], nil
	}
	return strings.TrimRight(text[:at], " \t\n\r\v\f"), nil
}
