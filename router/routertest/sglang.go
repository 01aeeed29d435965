package routertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// forGood is longer than any test.
const forGood = time.Hour

// sglangMembers are what the router adds to a request.
type sglangMembers struct {
	Host json.RawMessage `json:"bootstrap_host"`
	Port json.RawMessage `json:"bootstrap_port"`
	Room json.RawMessage `json:"bootstrap_room"`
	RID  string          `json:"rid"`

	Text           json.RawMessage `json:"text"`
	InputIDs       json.RawMessage `json:"input_ids"`
	ReturnLogprob  bool            `json:"return_logprob"`
	SamplingParams struct {
		MaxNewTokens int `json:"max_new_tokens"`
	} `json:"sampling_params"`
}

// registered are the requests that an SGLang engine's scheduler knows.
type registered struct {
	mu     sync.Mutex // guards what follows
	calls  map[string]chan struct{}
	aborts map[string][]time.Time
}

// parseSGLang reads the room. All answers have one of their own.
func (c *EngineCall) parseSGLang() error {
	p := &c.sglang
	if err := json.Unmarshal(c.Body, p); err != nil {
		return err
	}
	if c.Path == "/generate" {
		var text string
		if json.Unmarshal(p.Text, &text) == nil {
			c.prompt = text
		} else {
			c.prompt = string(p.Text) + string(p.InputIDs)
		}
		c.b.MaxTokens = max(p.SamplingParams.MaxNewTokens, 1)
		if c.b.Model != "" {
			return errors.New("a model for /generate")
		}
		c.b.Model = c.Engine.Model
	}
	switch {
	case len(c.Params) > 0:
		return errors.New("transfer parameters for SGLang")
	case len(p.RID) != 32:
		return fmt.Errorf("rid %q: one may be another's beginning", p.RID)
	case p.Room == nil && c.Engine.Role == "both":
		return nil
	case p.Room == nil:
		return errors.New("no room: the engine is in " + string(c.Engine.Role) + " mode and waits for ever")
	}
	rooms, err := c.rooms()
	if err != nil {
		return err
	}
	c.Role = string(c.Engine.Role)
	c.key = "room " + rooms[0]
	return c.Engine.Cluster.useRooms(p.RID, rooms)
}

// rooms reads the rooms, as many as there are answers, with a host and a port for each.
func (c *EngineCall) rooms() ([]string, error) {
	p := &c.sglang
	answers := max(c.b.N, 1)
	list := c.b.N > 1
	for _, prompt := range []json.RawMessage{c.b.Prompt, p.Text, p.InputIDs} {
		var batch []json.RawMessage
		if json.Unmarshal(prompt, &batch) == nil && len(batch) > 0 && strings.ContainsRune(`"[`, rune(batch[0][0])) {
			answers, list = answers*len(batch), true
		}
	}
	read := func(raw json.RawMessage) []json.RawMessage {
		var all []json.RawMessage
		if !list {
			return []json.RawMessage{raw}
		}
		_ = json.Unmarshal(raw, &all)
		return all
	}
	rooms, hosts, ports := read(p.Room), read(p.Host), read(p.Port)
	if len(rooms) != answers || len(hosts) != answers || len(ports) != answers {
		return nil, fmt.Errorf("%s %s %s for %d answers", p.Host, p.Port, p.Room, answers)
	}
	var ids []string
	for i := range rooms {
		room, err := strconv.ParseUint(string(rooms[i]), 10, 63)
		if err != nil {
			return nil, fmt.Errorf("room %s: %w", rooms[i], err)
		}
		var host string
		_ = json.Unmarshal(hosts[i], &host)
		at := host + ":" + string(ports[i])
		if c.Engine.Role == "prefill" && at != c.Engine.KVAddr {
			return nil, fmt.Errorf("bootstrap server %s, this engine's is %s", at, c.Engine.KVAddr)
		}
		c.wantPeer(func(peer *Engine) string {
			if peer.Role == "prefill" && at != peer.KVAddr {
				return fmt.Sprintf("bootstrap server %s is not %s's", at, peer.ID)
			}
			return ""
		})
		ids = append(ids, strconv.FormatUint(room, 10))
	}
	return ids, nil
}

// useRooms holds that a room is one dispatch's alone.
func (c *Cluster) useRooms(rid string, rooms []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rooms == nil {
		c.rooms = map[string]string{}
	}
	for i, room := range rooms {
		key := rid + "/" + strconv.Itoa(i)
		if old, ok := c.rooms[room]; ok && old != key {
			return fmt.Errorf("room %s is used by %s and %s", room, old, key)
		}
		c.rooms[room] = key
	}
	return nil
}

// abortRequest takes what the router says of a request: all whose ids begin so are void. What is not known is forgotten.
func (e *Engine) abortRequest(w http.ResponseWriter, r *http.Request) {
	var p struct {
		RID string `json:"rid"`
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // this engine was killed, or the router was: neither breaks the protocol
	}
	if err := json.Unmarshal(body, &p); err != nil || len(p.RID) != 32 || r.Method != http.MethodPost {
		e.Cluster.violate("engine %s: %s with %.300q: %v", e.ID, r.Method, body, err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	if e.known.aborts == nil {
		e.known.aborts = map[string][]time.Time{}
	}
	e.known.aborts[p.RID] = append(e.known.aborts[p.RID], time.Now())
	if n := len(e.known.aborts[p.RID]); n > 2 {
		e.Cluster.violate("engine %s: %d aborts of %s", e.ID, n, p.RID)
	}
	for rid, gone := range e.known.calls {
		if strings.HasPrefix(rid, p.RID) {
			delete(e.known.calls, rid)
			close(gone)
		}
	}
}

// Aborts returns when the engine was told so, by request.
func (e *Engine) Aborts() map[string][]time.Time {
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	all := map[string][]time.Time{}
	for rid, at := range e.known.aborts {
		all[rid] = append([]time.Time(nil), at...)
	}
	return all
}

// register makes the scheduler know a call; the channel closes when it is told to forget it.
func (c *EngineCall) register() chan struct{} {
	e := c.Engine
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	if e.known.calls == nil {
		e.known.calls = map[string]chan struct{}{}
	}
	if e.known.calls[c.sglang.RID] != nil {
		e.Cluster.violate("engine %s: rid %s twice", e.ID, c.sglang.RID)
	}
	gone := make(chan struct{})
	e.known.calls[c.sglang.RID] = gone
	return gone
}

// forget is the end of a call that was served.
func (c *EngineCall) forget() {
	e := c.Engine
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	if gone := e.known.calls[c.sglang.RID]; gone != nil {
		delete(e.known.calls, c.sglang.RID)
		close(gone)
	}
}

// faultKnown is fault for a call that the scheduler knows: what the engine itself ends with an error it forgets.
func (c *EngineCall) faultKnown(stage string) error {
	err := c.fault(stage, 0)
	if errors.Is(err, errDone) {
		c.forget()
	}
	return err
}

// sameBody holds that both engines were asked for the same.
func (c *EngineCall) sameBody() {
	if o := c.meeting.other(c); o != nil && !bytes.Equal(o.Body, c.Body) {
		c.Engine.Cluster.violate("engines %s and %s got different bodies:\n%s\n%s", o.Engine.ID, c.Engine.ID, o.Body, c.Body)
	}
}

// sglangPrefill answers when decode has taken what it computed. That a client has gone it does not notice: what it holds it
// holds until decode has it, or it is told.
func (c *EngineCall) sglangPrefill() error {
	c.sameBody()
	m, gone := c.meeting, c.register()
	m.keep(c.Engine, forGood, gone)
	if err := c.faultKnown(StagePrefill); err != nil {
		return err
	}
	m.mark(m.computed)
	select {
	case <-m.moved:
	case <-gone:
		return errAbort
	case <-c.ctx.Done(): // the handler ends, and nothing else does
		return errAbort
	}
	if err := c.faultKnown(StageAnswer); err != nil {
		return err
	}
	c.forget()
	c.b.MaxTokens = 1
	if err := c.answer0(); err != nil {
		return err
	}
	return c.fault(StageAnswered, 0)
}

// sglangDecode waits for prefill, however long that takes, and generates, whoever listens.
func (c *EngineCall) sglangDecode() error {
	c.sameBody()
	e, m, gone := c.Engine, c.meeting, c.register()
	e.Cluster.hold(blocksPerLease)
	e.wg.Go(func() {
		select {
		case <-gone:
		case <-e.quit:
		}
		e.Cluster.hold(-blocksPerLease)
	})
	if err := c.faultKnown(StageLoad); err != nil {
		return err
	}
	m.mark(m.registered)
	select {
	case <-m.moved:
	case <-gone:
		return c.refuse(http.StatusInternalServerError, "aborted")
	case <-c.ctx.Done():
		return errAbort
	}
	if err := c.faultKnown(StageLoaded); err != nil {
		return err
	}
	if err := c.answer0(); err != nil {
		return err
	}
	c.forget()
	return nil
}

// answer0 answers as the endpoint does.
func (c *EngineCall) answer0() error {
	if c.Path != "/generate" || c.Engine.Reply != nil {
		return c.generate()
	}
	list := "[]"
	if c.Role == "prefill" {
		var b strings.Builder
		for i := range strings.Fields(c.prompt) {
			fmt.Fprintf(&b, `,[-%d.50, 9007199254740993, null]`, i)
		}
		list = "[" + strings.TrimPrefix(b.String(), ",") + "]"
	}
	answer := func(n int) string {
		meta := fmt.Sprintf(`{"id":%q,"finish_reason":null,"prompt_tokens":%d`, c.sglang.RID, len(strings.Fields(c.prompt)))
		if c.sglang.ReturnLogprob {
			meta += `,"input_token_logprobs":` + list
		}
		return `{"text":` + quote([]byte(Text(c.prompt, 0, n))) + `,"meta_info":` + meta + "}}"
	}
	if !c.b.Stream {
		c.w.Header().Set("Content-Type", "application/json")
		return c.write(answer(c.b.MaxTokens))
	}
	c.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for i := range c.b.MaxTokens {
		if err := c.fault(StageToken, i); err != nil {
			return err
		}
		if err := c.write("data: " + answer(i+1) + "\n\n"); err != nil {
			return err
		}
	}
	return c.write("data: [DONE]\n\n")
}
