// Package tokenize gives the router the token ids of a request's prompt: what the engine will make of it, with the
// model's own tokenizer and chat template.
//
// It follows an engine to the byte or not at all: what a request asks for and this package does not do is ErrUnsupported,
// and the router then routes by approximation. A wrong answer would cost a cache hit, never a wrong token for a client:
// engines still read the request themselves. It knows nothing of workers, pairing or HTTP.
package tokenize

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/bpe"
	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/gguf"
)

// ErrUnsupported is wrapped by every error about a request, or a model, whose tokens this package cannot tell.
var ErrUnsupported = errors.New("no exact tokens")

func unsupported(format string, a ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, a...))
}

// The endpoints that AppendPrompt knows.
const (
	Completions     = "/v1/completions"
	ChatCompletions = "/v1/chat/completions"
)

// Options say how a model is loaded. The zero value suits it as it is.
type Options struct {
	// Engine is whose way of reading requests is followed; zero is EngineNative for a GGUF file, EngineVLLM for a folder.
	Engine Engine
	// Template, when not empty, is the chat template to use in place of the model's.
	Template string
	// CacheBytes bounds the memory of what is remembered of conversations; zero is 256 MiB, negative is none.
	CacheBytes int64
	// Now is the clock of templates that print the date; nil is time.Now.
	Now func() time.Time
}

// Tokenizer turns requests into token ids. Make one with Load. It may be used by many goroutines.
type Tokenizer struct {
	bpe       *bpe.Tokenizer
	template  *chat.Template // nil: the model has none that works, for the reason in missing
	missing   error
	toolUse   *chat.Template // for requests with tools, where the model has one apart
	engine    Engine
	parts     bool // the template wants content as a list of parts
	developer bool // the template knows the role developer
	tools     bool // it knows tools
	keeps     bool // what it writes depends on nothing but the request and the day
	dated     bool // its output depends on the day
	now       func() time.Time
	cache     *cache // nil: none
	stubs     stubs
	shapes    shapes
	literals  literals // of the template
}

// fileBytesMax bounds the files of a folder: the largest known tokenizer.json has 33 MB.
const fileBytesMax = 256 << 20

// Load reads the tokenizer and the chat template of a model: a GGUF file, or a folder with Hugging Face's tokenizer.json,
// tokenizer_config.json and chat_template.jinja (the last two may be missing). Errors wrap ErrUnsupported for a model
// that this package does not know how to tokenize.
func Load(path string, o Options) (*Tokenizer, error) {
	t := &Tokenizer{engine: o.Engine, now: o.Now}
	if t.now == nil {
		t.now = time.Now
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	if info.IsDir() {
		err = t.loadFolder(path, o)
	} else {
		err = t.loadGGUF(path, o)
	}
	if errors.Is(err, bpe.ErrUnsupported) {
		err = fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("load tokenizer from %s: %w", path, err)
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = cacheBytes
	}
	if o.CacheBytes > 0 && t.template != nil && t.toolUse == nil && t.keeps {
		t.startCache(o.CacheBytes)
	}
	return t, nil
}

// cacheBytes is the default of Options.CacheBytes: a thousand conversations of 55,000 tokens.
const cacheBytes = 256 << 20

func (t *Tokenizer) loadGGUF(path string, o Options) error {
	if t.engine == 0 {
		t.engine = EngineNative
	}
	f, err := gguf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	tok, marks, err := bpe.FromGGUF(f)
	if err != nil {
		return err
	}
	t.bpe = tok
	tokens, _ := f.Strings("tokenizer.ggml.tokens")
	text := func(id int32) string {
		if id < 0 {
			return ""
		}
		return tokens[id]
	}
	source, _ := f.String("tokenizer.chat_template")
	if o.Template != "" {
		source = o.Template
	}
	t.setTemplate(source, chat.Options{BOS: text(marks.BOS), EOS: text(marks.EOS)})
	return nil
}

func (t *Tokenizer) loadFolder(dir string, o Options) error {
	if t.engine == 0 {
		t.engine = EngineVLLM
	}
	b, err := readFile(dir, "tokenizer.json")
	if err != nil {
		return err
	}
	if b == nil {
		return unsupported("the folder has no tokenizer.json")
	}
	if t.bpe, err = bpe.FromJSON(b); err != nil {
		return err
	}
	c, err := readConfig(dir)
	if err != nil {
		return err
	}
	jinja, err := readFile(dir, "chat_template.jinja")
	if err != nil {
		return err
	}
	source, tools := c.ChatTemplate.Default, c.ChatTemplate.ToolUse
	if jinja != nil {
		source, tools = string(jinja), ""
	}
	if o.Template != "" {
		source, tools = o.Template, ""
	}
	marks := chat.Options{BOS: c.BOS.Content, EOS: c.EOS.Content}
	if tools != "" {
		if t.toolUse, err = chat.New(tools, marks); err != nil {
			return fmt.Errorf("%w: %w", ErrUnsupported, err)
		}
	}
	t.setTemplate(source, marks)
	return nil
}

// setTemplate takes the model's chat template.
func (t *Tokenizer) setTemplate(source string, marks chat.Options) {
	if source == "" {
		t.missing = unsupported("the model has no chat template")
		return
	}
	template, err := chat.New(source, marks)
	if err != nil { // completions work all the same
		t.missing = fmt.Errorf("%w: %w", ErrUnsupported, err)
		return
	}
	t.template = template
	t.parts = wantsParts(source)
	t.developer = strings.Contains(source, `"developer"`) || strings.Contains(source, `'developer'`)
	t.tools = strings.Contains(source, "tools")
	t.dated = strings.Contains(source, "strftime_now")
	t.keeps = cacheable(source)
	t.literals = readLiterals(source)
}

// ChatError is why requests for chat completions cannot be told, nil where they can.
func (t *Tokenizer) ChatError() error { return t.missing }

// readFile returns nil for a file that is missing.
func readFile(dir, name string) ([]byte, error) {
	path := filepath.Join(dir, name)
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case info.Size() > fileBytesMax:
		return nil, fmt.Errorf("%s has %d bytes, want at most %d", name, info.Size(), fileBytesMax)
	}
	return os.ReadFile(path)
}
