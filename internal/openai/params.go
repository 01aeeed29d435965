package openai

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

func setBool(at func(*Request) *bool) func(*parser, []byte) error {
	return func(p *parser, v []byte) error {
		b, err := parseBool(v)
		if err == nil {
			*at(&p.req) = b
		}
		return err
	}
}

func setMaxTokens(completion bool) func(*parser, []byte) error {
	return func(p *parser, v []byte) error {
		n, err := parseInt(v)
		if err != nil {
			return err
		}
		if n < 0 || n > 1<<31-1 || n == 0 && completion {
			return errors.New("must be at least 1")
		}
		if completion || !p.newMax {
			p.req.MaxTokens, p.req.PromptOnly = int(n), n == 0
		}
		p.newMax = p.newMax || completion
		return nil
	}
}

func setTemperature(p *parser, v []byte) error {
	f, err := parseFloat(v)
	if err != nil {
		return err
	}
	if f < 0 || f > 2 {
		return errors.New("must be between 0 and 2")
	}
	p.req.Temperature = float32(f)
	return nil
}

func setTopP(p *parser, v []byte) error {
	f, err := parseFloat(v)
	if err != nil {
		return err
	}
	if f <= 0 || f > 1 || float32(f) == 0 {
		return errors.New("must be over 0 and at most 1")
	}
	p.req.TopP = float32(f)
	return nil
}

func setFloat(least, most float64, want string, at func(*Request) *float32) func(*parser, []byte) error {
	return func(p *parser, v []byte) error {
		f, err := parseFloat(v)
		if err != nil {
			return err
		}
		if f < least || f > most {
			return errors.New(want)
		}
		*at(&p.req) = float32(f)
		return nil
	}
}

// setBias reads {"TOKEN ID": BIAS}.
func setBias(p *parser, v []byte) error {
	bias := map[int32]float32{}
	err := parseObject(v, func(key string, v []byte) error {
		id, err := strconv.ParseInt(key, 10, 32)
		if err != nil || id < 0 {
			return errors.New("the key must be a token id")
		}
		f, err := parseFloat(v)
		if err != nil {
			return err
		}
		if f < -100 || f > 100 {
			return errors.New("must be between -100 and 100")
		}
		if bias[int32(id)] = float32(f); len(bias) > BiasesMax {
			return fmt.Errorf("there are more than %d tokens", BiasesMax)
		}
		return nil
	})
	p.req.Bias = nil
	if len(bias) > 0 {
		p.req.Bias = bias
	}
	return err
}

// ParseN reads the value of n. Router and worker must agree on it, so both use this.
func ParseN(v []byte) (int, error) {
	n, err := parseInt(v)
	if err == nil && (n < 1 || n > ChoicesMax) {
		err = fmt.Errorf("must be between 1 and %d", ChoicesMax)
	}
	return int(n), err
}

func setN(p *parser, v []byte) (err error) {
	p.req.N, err = ParseN(v)
	return err
}

func setBestOf(p *parser, v []byte) (err error) {
	if p.bestOf, err = parseInt(v); err == nil && p.bestOf < 1 {
		err = errors.New("must be at least 1")
	}
	return err
}

// setLogprobs takes a number for completions, where 0 asks for the sampled token's alone, and a truth value for chats.
func setLogprobs(p *parser, v []byte) error {
	p.req.Logprobs = false
	if string(v) == "false" {
		return nil
	}
	if p.req.Endpoint == Chat {
		b, err := parseBool(v)
		p.req.Logprobs = b
		return err
	}
	return p.topLogprobs(v)
}

func setTopLogprobs(p *parser, v []byte) error {
	if p.req.Endpoint == Completions {
		n, err := parseInt(v)
		p.top = n != 0
		return err
	}
	logprobs := p.req.Logprobs
	err := p.topLogprobs(v)
	p.req.Logprobs, p.top = logprobs, p.req.TopLogprobs > 0
	return err
}

func (p *parser) topLogprobs(v []byte) error {
	n, err := parseInt(v)
	if err != nil {
		return err
	}
	if n < 0 || n > LogprobsMax {
		return fmt.Errorf("must be between 0 and %d", LogprobsMax)
	}
	p.req.Logprobs, p.req.TopLogprobs = true, int(n)
	return nil
}

func setTopK(p *parser, v []byte) error {
	n, err := parseInt(v)
	if err != nil {
		return err
	}
	if n < -1 || n > 1<<31-1 {
		return errors.New("must be at least 1, or 0 or -1 for no limit")
	}
	p.req.TopK = int(max(n, 0))
	return nil
}

func setSeed(p *parser, v []byte) (err error) {
	p.req.Seed, err = parseSeed(v)
	p.req.HasSeed = err == nil
	return err
}

func setStop(p *parser, v []byte) error {
	p.req.Stop = nil
	add := func(e []byte) error {
		s, err := unquote(e)
		switch {
		case err != nil:
			return errors.New("must be a string or an array of strings")
		case len(s) > StopBytesMax:
			return fmt.Errorf("a stop string must have at most %d bytes", StopBytesMax)
		case len(p.req.Stop) >= StopMax:
			return fmt.Errorf("must have at most %d strings", StopMax)
		case s != "":
			p.req.Stop = append(p.req.Stop, s)
		}
		return nil
	}
	if v[0] == '"' {
		return add(v)
	}
	return walkArray(v, add)
}

func setStopTokens(p *parser, v []byte) (err error) {
	p.req.StopTokens, err = parseTokens(v, StopTokensMax)
	return err
}

func setSkipSpecial(p *parser, v []byte) error {
	b, err := parseBool(v)
	p.req.KeepSpecial = !b
	return err
}

func setStreamOptions(p *parser, v []byte) error {
	return parseObject(v, func(key string, v []byte) (err error) {
		if key == "include_usage" {
			p.req.IncludeUsage, err = parseBool(v)
		}
		return err
	})
}

func setTools(p *parser, v []byte) error {
	p.req.Tools = nil
	n := 0
	err := walkArray(v, func(e []byte) error {
		if e[0] != '{' {
			return errors.New("must be an array of tools")
		}
		n++
		return nil
	})
	if err == nil && n > 0 {
		p.req.Tools = bytes.Clone(v)
	}
	return err
}

func setToolChoice(p *parser, v []byte) error {
	if v[0] == '"' {
		s, err := unquote(v)
		p.badChoice = s != "none" && s != "auto"
		return err
	}
	p.badChoice = true
	return nil
}

func setTemplateArgs(p *parser, v []byte) error {
	if v[0] != '{' {
		return errors.New("must be an object")
	}
	p.req.TemplateArgs = bytes.Clone(v)
	return nil
}

func setModalities(_ *parser, v []byte) error {
	return walkArray(v, func(e []byte) error {
		if s, err := unquote(e); err != nil || s != "text" {
			return Unsupported("modalities", "This server answers with text only.")
		}
		return nil
	})
}

func setResponseFormat(_ *parser, v []byte) error {
	kind := ""
	err := parseObject(v, func(key string, v []byte) (err error) {
		if key == "type" {
			kind, err = unquote(v)
		}
		return err
	})
	if err != nil {
		return errors.New("must be an object with a type")
	}
	if kind != "text" {
		return Unsupported("response_format", "This server does not constrain its output: 'response_format' can only be {\"type\":\"text\"}.")
	}
	return nil
}

func onlyInt(name string, only int64) func(*parser, []byte) error {
	return func(_ *parser, v []byte) error {
		n, err := parseInt(v)
		if err != nil {
			return err
		}
		if n != only {
			return Unsupported(name, "This server supports '%s': %d only.", name, only)
		}
		return nil
	}
}

func onlyFalse(name string) func(*parser, []byte) error {
	return func(_ *parser, v []byte) error {
		b, err := parseBool(v)
		if err == nil && b {
			err = Unsupported(name, "This server does not support '%s'.", name)
		}
		return err
	}
}

// onlyEmpty takes {}, [] and "".
func onlyEmpty(name string) func(*parser, []byte) error {
	return func(_ *parser, v []byte) error {
		switch strings.Join(strings.Fields(string(v[:min(len(v), 64)])), "") {
		case "{}", "[]", `""`:
			return nil
		}
		return Unsupported(name, "This server does not support '%s'.", name)
	}
}

func refuse(name string) func(*parser, []byte) error {
	return func(*parser, []byte) error {
		return Unsupported(name, "This server does not support '%s'.", name)
	}
}

func setKV(p *parser, v []byte) error {
	if !p.opts.AllowKV {
		return Unsupported("kv_transfer_params", "'kv_transfer_params' is reserved for the servers' own use.")
	}
	kv, err := parseKV(v)
	p.req.KV = kv
	return err
}
