package openai

import (
	"bytes"
	"fmt"

	"github.com/tidwall/gjson"
)

// Chunk is what a router needs of a worker's data event.
type Chunk struct {
	Index  int  // of the choice
	Role   bool // the chat's first chunk
	Text   string
	Finish string
	Usage  *Usage
}

// IsUsage reports whether the JSON of a data event is the usage chunk, without parsing it. Text cannot look like it:
// quotes inside of strings are escaped.
func IsUsage(data []byte) bool { return bytes.Contains(data, []byte(`"choices":[]`)) }

// Assembler puts the chunks of a stream together into a response that is not streamed.
type Assembler struct {
	Endpoint Endpoint
	Whole    Whole
}

// Add takes the JSON of a data event.
func (a *Assembler) Add(data []byte) (Chunk, error) {
	c, err := ParseChunk(data)
	if err != nil {
		return c, err
	}
	w := &a.Whole
	if c.Usage != nil {
		w.Usage = *c.Usage
	}
	first := gjson.GetBytes(data, "choices.0")
	a.addTokens(&w.PromptIDs, data, "prompt_token_ids", c.Index)
	if !first.Exists() {
		return c, nil
	}
	choice := w.At(c.Index)
	choice.Text = append(choice.Text, c.Text...)
	if c.Finish != "" {
		choice.Finish = c.Finish
	}
	if lp := first.Get("logprobs"); lp.IsObject() {
		choice.Logprobs.addRaw(a.Endpoint, lp)
	}
	a.addTokens(&choice.TokenIDs, data, "choices.0.token_ids", 0)
	a.addTokens(&w.PromptIDs, data, "choices.0.prompt_token_ids", c.Index)
	return c, nil
}

// addTokens adds a list of ids; those of the prompt are every choice's, and taken from the first alone.
func (a *Assembler) addTokens(dst *[]int32, data []byte, path string, index int) {
	if index > 0 || !bytes.Contains(data, []byte(`token_ids":`)) {
		return
	}
	if v := gjson.GetBytes(data, path); v.IsArray() {
		if *dst == nil {
			*dst = []int32{}
		}
		for _, id := range v.Array() {
			*dst = append(*dst, int32(id.Int()))
		}
	}
}

// ParseChunk reads the JSON of a data event of either endpoint.
func ParseChunk(data []byte) (Chunk, error) {
	if err := checkJSON(data); err != nil {
		return Chunk{}, fmt.Errorf("read chunk: %w", err)
	}
	choice := gjson.GetBytes(data, "choices.0")
	index := choice.Get("index").Int()
	if index < 0 || index >= ChoicesMax {
		return Chunk{}, fmt.Errorf("read chunk: choice %d", index)
	}
	c := Chunk{
		Index:  int(index),
		Role:   choice.Get("delta.role").Exists(),
		Finish: choice.Get("finish_reason").String(),
	}
	if d := choice.Get("delta.content"); d.Exists() {
		c.Text = d.String()
	} else {
		c.Text = choice.Get("text").String()
	}
	if u := gjson.GetBytes(data, "usage"); u.IsObject() {
		c.Usage = &Usage{
			Prompt:     int(u.Get("prompt_tokens").Int()),
			Completion: int(u.Get("completion_tokens").Int()),
			Cached:     int(u.Get("prompt_tokens_details.cached_tokens").Int()),
		}
	}
	return c, nil
}
