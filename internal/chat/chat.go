// Package chat renders a conversation into a prompt with the chat template of the model file.
//
// Templates are Jinja, run in an environment of our own: they see the conversation and nothing else. The statements
// that load other templates do not exist in it, and no loader could find a file. It knows no tokens and no HTTP.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/exec"

	"github.com/headrace/headrace/internal/openai"
)

// Limits.
const (
	TemplateBytesMax = 1 << 20
	OutputBytesMax   = 16 << 20
)

// Errors of Render that are the client's.
var (
	ErrTooLong  = fmt.Errorf("render chat template: the prompt is over %d bytes", OutputBytesMax)
	ErrNoTools  = errors.New("render chat template: the model's chat template knows no tools")
	ErrBadInput = errors.New("render chat template")
)

// RaisedError is what a template said with raise_exception: the conversation is not one the model takes.
type RaisedError struct{ Message string }

func (e *RaisedError) Error() string { return e.Message }

// Options are the marks a template may print.
type Options struct {
	BOS, EOS string
}

// Template is a compiled chat template. Many goroutines may render it.
type Template struct {
	template *exec.Template
	options  Options
	tools    bool
}

// New compiles a template.
func New(source string, o Options) (*Template, error) {
	if len(source) > TemplateBytesMax {
		return nil, fmt.Errorf("compile chat template: over %d bytes", TemplateBytesMax)
	}
	t, err := compile(source)
	if err != nil {
		return nil, fmt.Errorf("compile chat template: %w", err)
	}
	return &Template{template: t, options: o, tools: strings.Contains(source, "tools")}, nil
}

// Input is what a template is given.
type Input struct {
	Messages []openai.Message
	// Conversation, when not nil, is what the template gets in place of Messages: an array of objects, as they are.
	Conversation         json.RawMessage
	Tools                json.RawMessage // an array, or nil
	Args                 json.RawMessage // an object with further variables, or nil
	AddGenerationPrompt  bool
	ContinueFinalMessage bool
	// Now is the time that templates which print a date use. All workers that serve a request must use the same.
	Now time.Time
}

// Render returns the prompt. Errors are the client's, but for templates that are broken.
func (t *Template) Render(in Input) (prompt string, err error) {
	if in.Tools != nil && !t.tools {
		return "", ErrNoTools
	}
	vars, err := t.variables(in)
	if err != nil {
		return "", err
	}
	var raised *RaisedError
	vars["raise_exception"] = func(message string) (string, error) {
		raised = &RaisedError{Message: message}
		return "", raised
	}
	out := &limited{}
	defer func() { // the template language divides by zero and indexes as it likes
		if p := recover(); p != nil {
			prompt, err = "", fmt.Errorf("render chat template: %v", p)
		}
	}()
	if err := t.template.Execute(out, exec.NewContext(vars)); err != nil {
		switch {
		case raised != nil:
			return "", raised
		case out.full:
			return "", ErrTooLong
		}
		return "", fmt.Errorf("render chat template: %w", err)
	}
	prompt = out.b.String()
	if in.ContinueFinalMessage {
		return continued(prompt, in.Messages)
	}
	return prompt, nil
}

// continued cuts the prompt behind the last message's text, so that the model goes on with it.
func continued(prompt string, messages []openai.Message) (string, error) {
	if len(messages) == 0 {
		return "", fmt.Errorf("%w: there is no message to continue", ErrBadInput)
	}
	last := strings.TrimSpace(messages[len(messages)-1].Content)
	at := strings.LastIndex(prompt, last)
	if last == "" || at < 0 {
		return "", fmt.Errorf("%w: the last message is empty, or not in the prompt, and cannot be continued", ErrBadInput)
	}
	return prompt[:at+len(last)], nil
}

func (t *Template) variables(in Input) (map[string]any, error) {
	vars := map[string]any{}
	if in.Args != nil {
		v, err := decode(in.Args)
		if err != nil {
			return nil, fmt.Errorf("%w: chat_template_kwargs: %w", ErrBadInput, err)
		}
		if d, ok := v.(*exec.Dict); ok {
			for _, p := range d.Pairs {
				vars[p.Key.String()] = p.Value.Interface()
			}
		}
	}
	messages, err := conversation(&in)
	if err != nil {
		return nil, err
	}
	vars["messages"] = messages
	vars["add_generation_prompt"] = in.AddGenerationPrompt
	vars["bos_token"] = t.options.BOS
	vars["eos_token"] = t.options.EOS
	vars["tools"] = nil
	vars["documents"] = nil
	now := in.Now
	vars["strftime_now"] = func(format string) string { return strftime(now, format) }
	if in.Tools != nil {
		tools, err := decode(in.Tools)
		if err != nil {
			return nil, fmt.Errorf("%w: tools: %w", ErrBadInput, err)
		}
		vars["tools"] = tools
	}
	return vars, nil
}

// conversation is what the template sees as messages.
func conversation(in *Input) (any, error) {
	if in.Conversation != nil {
		messages, err := decode(in.Conversation)
		if err != nil {
			return nil, fmt.Errorf("%w: messages: %w", ErrBadInput, err)
		}
		return messages, nil
	}
	messages := make(list, len(in.Messages))
	for i := range in.Messages {
		m, err := message(&in.Messages[i])
		if err != nil {
			return nil, fmt.Errorf("%w: messages[%d].tool_calls: %w", ErrBadInput, i, err)
		}
		messages[i] = m
	}
	return messages, nil
}

func message(m *openai.Message) (*exec.Dict, error) {
	d := exec.NewDict()
	set := func(key string, value any) {
		d.Pairs = append(d.Pairs, &exec.Pair{Key: exec.AsValue(key), Value: exec.AsValue(value)})
	}
	set("role", m.Role)
	if m.Null {
		set("content", nil)
	} else {
		set("content", m.Content)
	}
	if m.Name != "" {
		set("name", m.Name)
	}
	if m.ToolCallID != "" {
		set("tool_call_id", m.ToolCallID)
	}
	if m.ToolCalls != nil {
		calls, err := decode(m.ToolCalls)
		if err != nil {
			return nil, err
		}
		openArguments(calls)
		set("tool_calls", calls)
	}
	return d, nil
}

// openArguments turns the arguments of calls, JSON within a string on the wire, into the object templates expect.
func openArguments(calls any) {
	l, _ := calls.(list)
	for _, call := range l {
		d, _ := call.(*exec.Dict)
		if d == nil {
			continue
		}
		f, _ := d.Get(exec.AsValue("function")).Interface().(*exec.Dict)
		if f == nil {
			continue
		}
		for _, p := range f.Pairs {
			if p.Key.String() != "arguments" || !p.Value.IsString() {
				continue
			}
			if v, err := decode([]byte(p.Value.String())); err == nil {
				if _, ok := v.(*exec.Dict); ok {
					p.Value = exec.AsValue(v)
				}
			}
		}
	}
}

// limited is a buffer that refuses to grow over OutputBytesMax.
type limited struct {
	b    strings.Builder
	full bool
}

func (l *limited) Write(p []byte) (int, error) {
	if l.b.Len()+len(p) > OutputBytesMax {
		l.full = true
		return 0, ErrTooLong
	}
	return l.b.Write(p)
}
