package tokenize

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
)

// Engine is whose way of reading a request is followed: engines give a template slightly different views of it.
type Engine uint8

const (
	// EngineVLLM is vLLM, as of its version 0.32: facts are from vllm/renderers/chat_utils.py and renderers/hf.py.
	EngineVLLM Engine = iota + 1
	// EngineNative is Headrace's own worker.
	EngineNative
)

// kind is the shape of a message without its texts: what templates branch on.
type kind struct {
	role      string
	content   uint8 // contentNone and on
	calls     uint8 // tool calls, at most 2 for more
	reasoning bool
	name      bool
}

const (
	contentNone uint8 = iota
	contentEmpty
	contentText
)

// message holds the members of one message that engines look at, as the client wrote them.
type message struct {
	role, content, name, reasoning, reasoningOld, calls, callID, task, tools []byte
}

func readMessage(raw []byte) (m message, err error) {
	err = walkObject(raw, func(key, value []byte) error {
		switch string(key) {
		case "role":
			m.role = value
		case "content":
			m.content = value
		case "name":
			m.name = value
		case "reasoning":
			m.reasoning = value
		case "reasoning_content":
			m.reasoningOld = value
		case "tool_calls":
			m.calls = value
		case "tool_call_id":
			m.callID = value
		case "task":
			m.task = value
		case "tools":
			m.tools = value
		}
		return nil
	})
	return m, err
}

// appendMessage appends the object that the engine gives the template for a client's message.
func (t *Tokenizer) appendMessage(dst, raw []byte) ([]byte, kind, error) {
	m, err := readMessage(raw)
	if err != nil {
		return dst, kind{}, unsupported("a message: %v", err)
	}
	var k kind
	if k.role, err = unquote(m.role); err != nil {
		return dst, k, unsupported("a message without a role")
	}
	if k.role == "developer" && t.engine == EngineVLLM && !t.developer {
		return dst, k, unsupported("a developer message, which the model's template does not know")
	}
	dst = append(append(dst, `{"role":`...), m.role...)
	if dst, err = t.appendContent(append(dst, `,"content":`...), &m, &k); err != nil {
		return dst, k, err
	}
	if isString(m.name) && (len(m.name) > 2 || t.engine == EngineVLLM) {
		k.name = true
		dst = append(append(dst, `,"name":`...), m.name...)
	}
	if t.engine == EngineNative {
		dst, err = appendNative(dst, &m, &k)
	} else {
		dst, err = appendVLLM(dst, &m, &k)
	}
	return append(dst, '}'), k, err
}

func appendNative(dst []byte, m *message, k *kind) ([]byte, error) {
	if isString(m.callID) && len(m.callID) > 2 {
		dst = append(append(dst, `,"tool_call_id":`...), m.callID...)
	}
	if isNull(m.calls) {
		return dst, nil
	}
	calls, err := appendItems(nil, m.calls)
	if err != nil {
		return dst, unsupported("tool_calls: %v", err)
	}
	k.calls = uint8(min(2, len(calls)))
	dst = append(dst, `,"tool_calls":[`...)
	for i, call := range calls {
		if i > 0 {
			dst = append(dst, ',')
		}
		if dst, err = appendCall(dst, call, false); err != nil {
			return dst, err
		}
	}
	return append(dst, ']'), nil
}

func appendVLLM(dst []byte, m *message, k *kind) ([]byte, error) {
	switch k.role {
	case "assistant":
		reasoning := m.reasoning
		if isNull(reasoning) {
			reasoning = m.reasoningOld
		}
		var calls [][]byte
		var err error
		if !isNull(m.calls) {
			if calls, err = appendItems(nil, m.calls); err != nil {
				return dst, unsupported("tool_calls: %v", err)
			}
		}
		k.calls = uint8(min(2, len(calls)))
		for i, call := range calls {
			if i == 0 {
				dst = append(dst, `,"tool_calls":[`...)
			} else {
				dst = append(dst, ',')
			}
			if dst, err = appendCall(dst, call, true); err != nil {
				return dst, err
			}
		}
		if len(calls) > 0 {
			dst = append(dst, ']')
		}
		if !isNull(reasoning) {
			k.reasoning = true
			dst = append(append(dst, `,"reasoning":`...), reasoning...)
			dst = append(append(dst, `,"reasoning_content":`...), reasoning...)
		}
	case "tool":
		if m.callID != nil {
			dst = append(append(dst, `,"tool_call_id":`...), m.callID...)
		}
	case "developer":
		dst = append(dst, `,"tools":`...)
		if m.tools == nil {
			m.tools = []byte("null")
		}
		dst = append(dst, m.tools...)
	}
	if isString(m.task) {
		dst = append(append(dst, `,"task":`...), m.task...)
	}
	return dst, nil
}

// billing begins a line that vLLM drops from system messages.
var billing = []byte("x-anthropic-billing-header:")

// appendContent appends a message's content: a string, or the list of parts where the template wants one.
func (t *Tokenizer) appendContent(dst []byte, m *message, k *kind) ([]byte, error) {
	parts := t.parts && t.engine == EngineVLLM && k.role != "tool"
	if k.role == "system" && bytes.Contains(m.content, billing) {
		return dst, unsupported("a system message with a billing header")
	}
	switch {
	case isNull(m.content):
		switch {
		case t.engine == EngineNative:
			return append(dst, "null"...), nil
		case parts:
			return append(dst, "[]"...), nil
		}
		return append(dst, `""`...), nil
	case isString(m.content):
		k.content = contentText
		if len(m.content) == 2 {
			k.content = contentEmpty
		}
		if parts {
			return append(append(append(dst, `[{"type":"text","text":`...), m.content...), "}]"...), nil
		}
		return append(dst, m.content...), nil
	}
	return appendParts(dst, m.content, parts, k)
}

// appendParts appends a content that is a list, as a list or as one string with a line end between the parts.
func appendParts(dst, content []byte, parts bool, k *kind) ([]byte, error) {
	items, err := appendItems(nil, content)
	if err != nil {
		return dst, unsupported("content is neither a string nor a list")
	}
	k.content = contentEmpty
	if parts {
		dst = append(dst, '[')
	} else {
		dst = append(dst, '"')
	}
	written := 0
	for _, item := range items {
		text, err := partText(item)
		if err != nil {
			return dst, err
		}
		if text == nil {
			continue
		}
		if len(text) > 2 {
			k.content = contentText
		}
		switch {
		case parts:
			if written > 0 {
				dst = append(dst, ',')
			}
			dst = append(append(append(dst, `{"type":"text","text":`...), text...), '}')
		default:
			if written > 0 {
				dst = append(dst, `\n`...)
			}
			dst = append(dst, text[1:len(text)-1]...)
		}
		written++
	}
	if parts {
		return append(dst, ']'), nil
	}
	return append(dst, '"'), nil
}

// partText returns the text of a part as it is written, nil where it has none. Other media are not supported.
func partText(item []byte) ([]byte, error) {
	if isString(item) {
		return item, nil
	}
	var kind, text, extra []byte
	err := walkObject(item, func(key, value []byte) error {
		switch string(key) {
		case "type":
			kind = value
		case "text", "refusal":
			text = value
		default:
			extra = key
		}
		return nil
	})
	switch {
	case err != nil:
		return nil, unsupported("a part of a content: %v", err)
	case string(kind) != `"text"` && string(kind) != `"refusal"` && string(kind) != `"input_text"` && string(kind) != `"output_text"`:
		return nil, unsupported("a part of type %.40s", kind)
	case extra != nil:
		return nil, unsupported("a part with %.40q", extra)
	case isNull(text):
		return nil, nil
	case !isString(text):
		return nil, unsupported("a part whose text is no string")
	}
	return text, nil
}

// appendCall appends a tool call with its arguments, JSON within a string on the wire, as the object templates expect.
// vLLM writes the members that it knows first, in its own order, and takes anything that is no object for an empty one.
func appendCall(dst, call []byte, vllm bool) ([]byte, error) {
	known, all, err := members(call, vllm, "id", "function", "type")
	if err != nil || known[1] == nil || known[1][0] != '{' {
		return dst, unsupported("a tool call without a function")
	}
	return appendObject(dst, all, func(dst []byte, key, value []byte) ([]byte, error) {
		if string(key) == "function" {
			return appendFunction(dst, value, vllm)
		}
		return append(dst, value...), nil
	})
}

// members reads an object. known are the values of the members with these names, nil for none; all are its members in the order
// in which they are to be written: as they came or, for vLLM, the known ones first.
func members(object []byte, vllm bool, names ...string) (known [][]byte, all [][2][]byte, err error) {
	known = make([][]byte, len(names))
	err = walkObject(object, func(key, value []byte) error {
		i := slices.Index(names, string(key))
		if i >= 0 {
			known[i] = value
		}
		if i < 0 || !vllm {
			all = append(all, [2][]byte{key, value})
		}
		return nil
	})
	if vllm {
		first := make([][2][]byte, len(names), len(names)+len(all))
		for i, name := range names {
			first[i] = [2][]byte{[]byte(name), known[i]}
		}
		all = append(first, all...)
	}
	return known, all, err
}

func appendFunction(dst, function []byte, vllm bool) ([]byte, error) {
	_, all, err := members(function, vllm, "arguments", "name")
	if err != nil {
		return dst, unsupported("a tool call's function: %v", err)
	}
	if vllm && all[0][1] == nil {
		all[0][1] = []byte("null")
	}
	return appendObject(dst, all, func(dst []byte, key, value []byte) ([]byte, error) {
		if string(key) != "arguments" {
			return append(dst, value...), nil
		}
		if isString(value) {
			var text string
			if json.Unmarshal(value, &text) != nil {
				return dst, unsupported("arguments: %v", errJSON)
			}
			if inner := bytes.TrimSpace([]byte(text)); len(inner) > 0 && inner[0] == '{' && json.Valid(inner) {
				return append(dst, inner...), nil
			}
		} else if len(value) > 0 && value[0] == '{' {
			return append(dst, value...), nil
		}
		if vllm {
			return append(dst, "{}"...), nil
		}
		return append(dst, value...), nil
	})
}

// appendObject appends an object of the members that have a value.
func appendObject(dst []byte, members [][2][]byte, appendValue func(dst, key, value []byte) ([]byte, error)) ([]byte, error) {
	dst = append(dst, '{')
	written := 0
	for _, m := range members {
		if m[1] == nil {
			continue
		}
		if written > 0 {
			dst = append(dst, ',')
		}
		written++
		key, err := json.Marshal(string(m[0]))
		if err != nil {
			return dst, err
		}
		dst = append(append(dst, key...), ':')
		if dst, err = appendValue(dst, m[0], m[1]); err != nil {
			return dst, err
		}
	}
	return append(dst, '}'), nil
}

// appendTools appends the tools as vLLM dumps them: known members alone, and null for a description or parameters that are missing.
func appendTools(dst, tools []byte) ([]byte, error) {
	items, err := appendItems(nil, tools)
	if err != nil || len(items) == 0 {
		return dst, unsupported("tools that are no list, or an empty one")
	}
	dst = append(dst, '[')
	for i, item := range items {
		if i > 0 {
			dst = append(dst, ',')
		}
		var function []byte
		err := walkObject(item, func(key, value []byte) error {
			switch string(key) {
			case "function":
				function = value
			case "type":
				if string(value) != `"function"` {
					return fmt.Errorf("of type %.40s", value)
				}
			case "defer_loading":
				return fmt.Errorf("with defer_loading")
			}
			return nil
		})
		if err != nil {
			return dst, unsupported("a tool: %v", err)
		}
		if dst, err = appendToolFunction(append(dst, `{"type":"function","function":`...), function); err != nil {
			return dst, err
		}
		dst = append(dst, '}')
	}
	return append(dst, ']'), nil
}

func appendToolFunction(dst, function []byte) ([]byte, error) {
	null := []byte("null")
	name, description, parameters, strict := []byte(nil), null, null, null
	err := walkObject(function, func(key, value []byte) error {
		switch string(key) {
		case "name":
			name = value
		case "description":
			description = value
		case "parameters":
			parameters = value
		case "strict":
			strict = value
		case "defer_loading":
			return fmt.Errorf("with defer_loading")
		}
		return nil
	})
	if err != nil || !isString(name) {
		return dst, unsupported("a tool without a function's name (%v)", err)
	}
	dst = append(append(dst, `{"name":`...), name...)
	dst = append(append(dst, `,"description":`...), description...)
	dst = append(append(dst, `,"parameters":`...), parameters...)
	if !isNull(strict) {
		dst = append(append(dst, `,"strict":`...), strict...)
	}
	return append(dst, '}'), nil
}
