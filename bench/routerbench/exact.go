package routerbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/bench/front"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
	"github.com/headrace/headrace/worker/kv"
	"github.com/headrace/headrace/worker/kvevents"
)

// Contestants of the part exact: one router, asked to go on with conversations that it and the workers know, or for new ones.
const (
	oursWarm = "headrace exact, warm"
	oursCold = "headrace exact, cold"
	coldEnd  = ", cold"
)

// Kinds of conversations.
const (
	talkWarm = "warm" // its last message alone is new with each request
	talkCold = "cold" // all of it is
)

const (
	talkBlock   = 16   // tokens of a KV block
	messageSize = 4000 // bytes, about
	lastSize    = 1000 // of the message that is new
	knownLeast  = 0.9  // of a warm prompt's tokens, that its worker is known to have
	followLimit = 20 * time.Second
)

// in tells whether a part is measured with it.
func (c *contestant) in(part string) bool {
	if part == partExact {
		return c.exact || c.name == direct || c.name == ours
	}
	return !c.exact && (c.name == direct || c.pairs == (part == partPairs))
}

// talk is the kind of conversation that it is asked with, in the part exact.
func (c *contestant) talk() string {
	if strings.HasSuffix(c.name, coldEnd) {
		return talkCold
	}
	return talkWarm
}

const (
	markDigits = 8
	markZero   = "00000000"
)

// converse gives a connection a conversation of its own.
func (c *client) converse(s shape, i int) {
	body := talkOf(s, i)
	c.sent = [][]byte{post(c.addr, body)}
	c.turn = 0
	if c.marks = bytes.LastIndex(c.sent[0], []byte(markZero)); s.talk == talkCold {
		c.marks = bytes.Index(c.sent[0], []byte(markZero))
	}
}

// asked counts what conversations were asked, over all runs.
var asked atomic.Int64

// mark makes the next request another one than all before.
func (c *client) mark() {
	if c.marks == 0 {
		return
	}
	n := asked.Add(1)
	for i := c.marks + markDigits - 1; i >= c.marks; i-- {
		c.sent[0][i] = byte('0' + n%10)
		n /= 10
	}
}

var talkWords = strings.Fields(`the of and to in is that it was for on are as with they be at one have this from or had by but some what there we can
 out other were all your when up use how said an each she which do their time if will way about many then them would write like so these her long make thing see him two has
 look more day could go come did number sound no most people my over know water than call first who may down side been now find any new work part take get place made live
 where after back little only round man year came show every good me give our under name very through just form sentence great think say help low line differ turn cause much
 mean before move right boy old too same tell does set three want air well also play small end put home read hand port large spell add even land here must big high such`)

// talkOf is the body of a request of about s.body bytes: messages of 4 KB, the last one of 1 KB. Conversations differ from
// their first words on.
func talkOf(s shape, i int) []byte {
	r := rand.New(rand.NewPCG(uint64(i), 0x74616c6b))
	b := make([]byte, 0, s.body+messageSize)
	b = fmt.Appendf(b, `{"model":"m","stream":%v,"max_tokens":64,"messages":[{"role":"system","content":"%s Conversation %d."}`, s.kind == kindStream, markZero, i)
	message := func(role, first string, size int) {
		b = append(b, `,{"role":"`+role+`","content":"`+first...)
		for end := len(b) + size - len(first); len(b) < end; {
			b = append(append(b, ' '), talkWords[r.IntN(len(talkWords))]...)
		}
		b = append(b, `"}`...)
	}
	roles := [2]string{"user", "assistant"}
	turn := 0
	for ; len(b) < s.body-lastSize-200; turn++ {
		message(roles[turn%2], "Well,", max(min(messageSize, s.body-lastSize-200-len(b)), 40))
	}
	if turn%2 == 1 {
		b = append(b, `,{"role":"assistant","content":"Yes."}`...)
	}
	message("user", markZero, max(min(lastSize, s.body-len(b)-40), 40))
	return append(b, "]}"...)
}

// talks are what the workers of the part exact have in their caches, and where they say so.
type talks struct {
	tokens     *tokenize.Tokenizer
	publishers []*kvevents.Publisher
	next       kv.ContentID
	admins     []string // of the routers
}

func (t *talks) close() error {
	if t == nil {
		return nil
	}
	var errs []error
	for _, p := range t.publishers {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// startExact starts the router that pairs by exact prefixes, and for each stand-in a publisher of the KV events that it
// has not by itself.
func (s *session) startExact(ctx context.Context) error {
	if s.o.Tokenizer == "" {
		s.note("exact routing: not measured (--model names none, and the default model was not fetched: headrace model)")
		return nil
	}
	path, err := filepath.Abs(s.o.Tokenizer)
	if err != nil {
		return err
	}
	s.talks = &talks{next: 1}
	if s.talks.tokens, err = tokenize.Load(path, tokenize.Options{}); err != nil {
		return err
	}
	workers := s.workers(pairing.DialectPlain)
	for i := range workers {
		if err := s.talks.publish(&workers[i]); err != nil {
			return err
		}
	}
	c := &childConfig{Kind: childRouter, Workers: workers, Exact: path}
	if s.o.Profiles != "" {
		c.Profile = filepath.Join(s.o.Profiles, "exact.pprof")
	}
	if err := s.addExact(ctx, "", c, oursWarm, oursCold); err != nil {
		return err
	}
	c.Profile = ""
	for _, binary := range s.o.Before {
		name := before + filepath.Base(binary)
		if err := s.addExact(ctx, binary, c, name+", warm", name+coldEnd); err != nil {
			return err
		}
	}
	return nil
}

// addExact starts such a router, by another binary than this one unless that is "".
func (s *session) addExact(ctx context.Context, binary string, c *childConfig, warm, cold string) error {
	addrs, err := s.startChild(ctx, binary, c)
	if err != nil {
		return err
	}
	s.talks.admins = append(s.talks.admins, addrs[1])
	s.add(contestant{name: warm, what: "joint, the model's tokens, KV events; conversations that go on", addr: addrs[0], exact: true, group: s.lastGroup()})
	s.add(contestant{name: cold, what: "the same router; all of each prompt is new to it", addr: addrs[0], exact: true, group: s.lastGroup()})
	return nil
}

// publish gives a worker a publisher of KV events.
func (t *talks) publish(w *pairing.Worker) error {
	at, err := front.Listen(2)
	if err != nil {
		return err
	}
	t.publishers = append(t.publishers, kvevents.New(at[0], at[1], talkBlock, slog.New(slog.DiscardHandler)))
	w.Events, w.EventsReplay = at[0].Addr().String(), at[1].Addr().String()
	return nil
}

// exact measures a shape with exact routing: as fast as can be, at the rate that is asked of it, and at half of its peak.
func (s *session) exact(ctx context.Context, shape shape) error {
	if s.talks == nil || !slices.Contains(s.o.Parts, partExact) {
		return nil
	}
	shape.talk = talkWarm
	if err := s.warm(ctx, shape); err != nil {
		return err
	}
	if err := s.row(ctx, partExact, shape); err != nil {
		return err
	}
	rates := []float64{s.o.Rate}
	if s.o.Rate == 0 {
		rates = []float64{exactRateLeast, s.report.Rows[len(s.report.Rows)-1].Series(oursWarm).RPS / 2}
	}
	for _, shape.rate = range rates {
		if err := s.row(ctx, partExact, shape); err != nil {
			return err
		}
	}
	return nil
}

// warm has workers tell that they have the conversations of a shape, by turns, and makes sure that the routers know.
func (s *session) warm(ctx context.Context, shape shape) error {
	bodies := make([][]byte, shape.conns)
	for i := range bodies {
		bodies[i] = talkOf(shape, i)
		ids, err := s.talks.tokens.AppendPrompt(nil, tokenize.ChatCompletions, bodies[i])
		if err != nil {
			return fmt.Errorf("tell the tokens of a conversation: %w", err)
		}
		s.talks.store(s.talks.publishers[i%len(s.talks.publishers)], ids)
	}
	for i, body := range bodies {
		want := "w" + strconv.Itoa(i%len(s.talks.publishers))
		var err error
		for end := time.Now().Add(followLimit); ; time.Sleep(20 * time.Millisecond) {
			if err = s.talks.known(ctx, body, want); err == nil || ctx.Err() != nil || time.Now().After(end) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("conversation %d: %w", i, err)
		}
	}
	return nil
}

// store publishes a prompt's blocks.
func (t *talks) store(p *kvevents.Publisher, ids []uint32) {
	parent := kv.Root
	block := make([]int32, talkBlock)
	for ; len(ids) >= talkBlock; ids = ids[talkBlock:] {
		for i, id := range ids[:talkBlock] {
			block[i] = int32(id)
		}
		t.next++
		p.Stored(t.next, parent, block)
		parent = t.next
	}
	p.Flush()
}

// known says what is wrong with what the routers know of a conversation.
func (t *talks) known(ctx context.Context, body []byte, worker string) error {
	for _, admin := range t.admins {
		if err := knownAt(ctx, admin, body, worker); err != nil {
			return err
		}
	}
	return nil
}

func knownAt(ctx context.Context, admin string, body []byte, worker string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+admin+"/debug/prefixes", bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the router what is cached: %s, %.200q, %w", resp.Status, said, err)
	}
	var page struct {
		Tokens  int
		Exact   bool
		Workers []struct {
			ID          string
			Cached      int `json:"cached_tokens"`
			Approximate bool
		}
	}
	if err := json.Unmarshal(said, &page); err != nil {
		return err
	}
	for _, w := range page.Workers {
		if least := int(knownLeast * float64(page.Tokens)); w.ID == worker && page.Exact && !w.Approximate && w.Cached >= min(least, page.Tokens-lastSize) {
			return nil
		}
	}
	return fmt.Errorf("the router knows of it %.300s", said)
}

const (
	exactBytesMin, exactBytesMax = 200_000, 250_000 // bodies that the targets are about
	exactRateLeast               = 1000             // requests a second
	exactP99Most                 = 5000             // us
)

// exactRows are those that the targets are about.
func (r *Report) exactRows(open bool, f func(w *Row, x *Series)) {
	for i := range r.Rows {
		w := &r.Rows[i]
		if x := w.Series(oursWarm); w.Part == partExact && w.Rate > 0 == open && w.BodyBytes >= exactBytesMin && w.BodyBytes <= exactBytesMax && x != nil {
			f(w, x)
		}
	}
}

func (r *Report) exactRate() bench.Verdict {
	worst, detail := math.NaN(), ""
	r.exactRows(false, func(w *Row, x *Series) {
		if !(x.RPS >= worst) {
			worst, detail = x.RPS, fmt.Sprintf("%s, %d bytes, %d connections: %.0f us of processor time each", w.Kind, w.BodyBytes, w.Connections, x.CPU)
		}
	})
	return verdict("exact, warm conversations of 220 KB: at least 1000 requests a second (least)", worst, worst >= exactRateLeast, detail)
}

// exactP99 judges the rows at that many requests a second, or those at all others.
func (r *Report) exactP99(target string, at bool) bench.Verdict {
	worst, detail := math.NaN(), ""
	r.exactRows(true, func(w *Row, x *Series) {
		if w.Rate == exactRateLeast == at && !(x.AddedP99 <= worst) {
			worst, detail = x.AddedP99, fmt.Sprintf("us: %s, %d bytes at %.0f/s", w.Kind, w.BodyBytes, w.Rate)
		}
	})
	return verdict("exact, warm conversations of 220 KB "+target+": added p99 under 5 ms (most)", worst, worst < exactP99Most, detail)
}
