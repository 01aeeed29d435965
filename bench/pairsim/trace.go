// Package pairsim compares pairing policies on a trace of requests, by simulation: the policies are the router's own, as is
// what it learns and counts; engines, caches and channels are models in virtual time. The same trace, options and seed give
// the same figures on any machine. It opens no socket and has no clock.
package pairsim

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"
)

// Request is one line of a trace.
type Request struct {
	// At is when it comes, in milliseconds since the trace's begin.
	At float64 `json:"timestamp"`
	// Input and Output are its prompt's and its answer's tokens.
	Input  int `json:"input_length"`
	Output int `json:"output_length"`
	// Blocks are its prompt's blocks of BlockTokens tokens, the last one not full mostly. Equal numbers are equal prompts up to
	// and with that block.
	Blocks []uint32 `json:"hash_ids"`
}

const (
	// BlockTokens is the length of a trace's blocks.
	BlockTokens = 512
	lineMax     = 1 << 20
	tokensMax   = 1 << 24
)

// ReadTrace reads a trace in the form in which Mooncake's authors publish theirs: a JSON object a line with timestamp (ms),
// input_length, output_length and hash_ids, in order of time.
func ReadTrace(r io.Reader) ([]Request, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 64<<10), lineMax)
	var out []Request
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var q Request
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return nil, fmt.Errorf("read trace, line %d: %w", n, err)
		}
		switch {
		case q.Input < 1 || q.Input > tokensMax || q.Output < 1 || q.Output > tokensMax:
			return nil, fmt.Errorf("read trace, line %d: input_length %d and output_length %d must be 1 to %d", n, q.Input, q.Output, tokensMax)
		case q.At < 0 || len(out) > 0 && q.At < out[len(out)-1].At:
			return nil, fmt.Errorf("read trace, line %d: timestamp %v is before that of the line before", n, q.At)
		case len(q.Blocks)*BlockTokens < q.Input || (len(q.Blocks)-1)*BlockTokens >= q.Input:
			return nil, fmt.Errorf("read trace, line %d: %d hash_ids of %d tokens for a prompt of %d", n, len(q.Blocks), BlockTokens, q.Input)
		}
		out = append(out, q)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	if len(out) == 0 {
		return nil, errors.New("read trace: it is empty")
	}
	return out, nil
}

// Generate makes a trace of n requests in conversations of several turns, each with the turns before in its prompt, that come a
// request each gap milliseconds on average. All prompts begin with the same block.
func Generate(n int, gap float64, seed uint64) []Request {
	rng := rand.New(rand.NewPCG(seed, 0x7061697273696d))
	type talk struct {
		blocks []uint32
		turns  int
		from   float64 // when its next turn may come: people read what they were answered
	}
	var talks []talk
	next := uint32(1)
	out := make([]Request, 0, n)
	for at := 0.0; len(out) < n; at += rng.ExpFloat64() * gap {
		var t talk
		if i := rng.IntN(len(talks) + 4); i < len(talks) && talks[i].from <= at {
			t = talks[i]
			talks = append(talks[:i], talks[i+1:]...)
		} else {
			t = talk{blocks: []uint32{0}, turns: 1 + rng.IntN(6)}
		}
		blocks := append([]uint32(nil), t.blocks...)
		for range 1 + int(rng.ExpFloat64()*8) {
			blocks = append(blocks, next)
			next++
		}
		input := len(blocks)*BlockTokens - rng.IntN(BlockTokens)
		out = append(out, Request{At: at, Input: input, Output: 1 + int(rng.ExpFloat64()*200), Blocks: blocks})
		if t.turns--; t.turns > 0 {
			t.blocks, t.from = blocks[:input/BlockTokens], at+gap*(50+rng.ExpFloat64()*100)
			talks = append(talks, t)
		}
	}
	return out
}

// Part is what comes of a trace in so much time from from on, as a trace of its own. to 0 is the end.
func Part(trace []Request, from, to time.Duration) []Request {
	var out []Request
	for _, q := range trace {
		at := time.Duration(q.At * float64(time.Millisecond))
		if at >= from && (to == 0 || at < to) {
			q.At -= float64(from) / float64(time.Millisecond)
			out = append(out, q)
		}
	}
	return out
}

// whole is how many of the request's blocks are full, and can be cached.
func (q *Request) whole() []uint32 { return q.Blocks[:min(q.Input/BlockTokens, len(q.Blocks))] }
