package routertest

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/headrace/headrace/internal/openai"
)

// promptToken is the first of the ids that stand for words of prompts.
const promptToken = 20000

// words are the fake's tokenizer: what it has seen has numbers.
type words struct {
	mu   sync.Mutex // guards what follows
	ids  map[string]int32
	list []string
}

var aWord = regexp.MustCompile(`\s*\S+\s*$|\s*\S+`)

func (w *words) tokenize(prompt string) (ids []int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ids == nil {
		w.ids = map[string]int32{}
	}
	for _, word := range aWord.FindAllString(prompt, -1) {
		id, ok := w.ids[word]
		if !ok {
			id = promptToken + int32(len(w.list))
			w.ids[word], w.list = id, append(w.list, word)
		}
		ids = append(ids, id)
	}
	return ids
}

// text is that of the prompt's tokens that ids begin with, and how many they are.
func (w *words) text(ids []int32) (text string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(ids) && ids[n] >= promptToken && int(ids[n]-promptToken) < len(w.list) {
		text += w.list[ids[n]-promptToken]
		n++
	}
	return text, n
}

// parseIDs reads a prompt of token ids as the text that it stands for and the tokens that the model has made behind it.
func (c *EngineCall) parseIDs() {
	var ids []int32
	if json.Unmarshal(c.b.Prompt, &ids) != nil {
		return
	}
	if text, n := c.Engine.Cluster.words.text(ids); n > 0 {
		c.prompt, c.prior = text, ids[n:]
	}
}

// checkPrior holds that a request goes on with what the model made.
func (c *EngineCall) checkPrior() error {
	for i, id := range c.prior {
		if want := tokenAt(c.prompt, c.b.Seed, i); id != want {
			return fmt.Errorf("token %d of the answer so far is %d, the model made %d", i, id, want)
		}
	}
	return nil
}

// stream answers by events, with a text kept back that may be the beginning of a stop string, as vLLM does.
func (c *EngineCall) stream(prompt string) error {
	if err := c.checkPrior(); err != nil {
		c.Engine.Cluster.violate("engine %s: %v in %.600s", c.Engine.ID, err, c.Body)
		return errAbort
	}
	c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	if err := c.write(""); err != nil { // the header goes before the first token is there
		return err
	}
	detok := openai.NewDetok(vocab{}, openai.DetokOptions{})
	detok.PushAll(c.prior)
	var text []byte // what is not sent yet
	repeats := ""   // with the rest of a character that the prompt ends in vLLM says all of the prompt again
	if n := len(c.prior); n > 0 && c.prior[n-1] == tokenHalf1 {
		repeats = prompt + Text(prompt, c.b.Seed, n-1)
	}
	var ids []int32
	hold := 0
	for _, s := range c.b.Stop {
		hold = max(hold, utf8.RuneCountInString(s)-1)
	}
	begun := len(c.prior)
	for i := range c.b.MaxTokens {
		if err := c.fault(StageToken, i+begun); err != nil {
			return err
		}
		if i == 0 {
			if err := c.role(prompt); err != nil {
				return err
			}
		}
		id := tokenAt(prompt, c.b.Seed, i+begun)
		more, _ := detok.Push(id)
		if len(more) > 0 {
			more, repeats = append([]byte(repeats), more...), ""
		}
		text, ids = append(text, more...), append(ids, id)
		finish, last := "null", i == c.b.MaxTokens-1
		for _, s := range c.b.Stop {
			if at := strings.Index(string(text), s); at >= 0 {
				text, finish, last = text[:at], `"stop"`, true
			}
		}
		if last && finish == "null" {
			text, finish = append(text, detok.Flush()...), `"length"`
		}
		if !last && (i+1)%max(c.Engine.Burst, 1) != 0 {
			continue
		}
		now := text
		for range hold {
			if last || len(now) == 0 {
				break
			}
			_, n := utf8.DecodeLastRune(now)
			now = now[:len(now)-n]
		}
		if err := c.write(c.chunk(now, finish, c.ids(i < max(c.Engine.Burst, 1), ids))); err != nil {
			return err
		}
		text, ids = slices.Clone(text[len(now):]), ids[:0]
		if last {
			c.b.MaxTokens = i + 1
			break
		}
	}
	if err := c.fault(StageFinish, 0); err != nil {
		return err
	}
	tail := ""
	if c.b.StreamOptions != nil {
		tail = "data: " + c.head(".chunk") + `"choices":[],` + c.usage() + "}\n\n"
	}
	return c.write(tail + "data: [DONE]\n\n")
}

// role is a chat's first event.
func (c *EngineCall) role(prompt string) error {
	if !c.chat() {
		return nil
	}
	ids := "null"
	if c.b.TokenIDs && !c.Engine.NoIDs {
		ids = list(c.Engine.Cluster.words.tokenize(prompt))
	}
	return c.write("data: " + c.head(".chunk") + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":` + ids + "}\n\n")
}

// ids are the members of an event about tokens, of a completion's first one those of the prompt too.
func (c *EngineCall) ids(first bool, made []int32) string {
	ids, prompt := "null", "null"
	if c.b.TokenIDs && !c.Engine.NoIDs {
		ids = list(made)
		if first {
			prompt = list(append(c.Engine.Cluster.words.tokenize(c.prompt), c.prior...))
		}
	}
	if c.chat() {
		return `,"token_ids":` + ids
	}
	return `,"prompt_token_ids":` + prompt + `,"token_ids":` + ids
}

func list(ids []int32) string {
	b, _ := json.Marshal(ids)
	return string(b)
}

func (c *EngineCall) chunk(text []byte, finish, ids string) string {
	if !c.chat() {
		return "data: " + c.head("") + `"choices":[{"index":0,"text":` + quote(text) + `,"logprobs":null,"finish_reason":` + finish + `,"stop_reason":null` + ids + `}]}` + "\n\n"
	}
	if finish != "null" {
		finish += `,"stop_reason":null`
	}
	return "data: " + c.head(".chunk") + `"choices":[{"index":0,"delta":{"content":` + quote(text) + `},"logprobs":null,"finish_reason":` + finish + ids + "}]}\n\n"
}

func (c *EngineCall) usage() string {
	n := len(strings.Fields(c.prompt)) + len(c.prior)
	return fmt.Sprintf(`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, n, n+c.b.MaxTokens, c.b.MaxTokens)
}
