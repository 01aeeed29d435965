package supervise

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headrace/headrace/internal/hostmem"
)

// control is the socket at which a planner asks a running `headrace up` to start and stop workers. It lies in the data folder, which is the
// user's alone.
type control struct {
	changed chan struct{} // capacity 1: the state file is to be written
	server  *http.Server
	stops   sync.WaitGroup // workers that end

	mu     sync.Mutex // guards closed; held while a worker is started
	closed bool
}

// EngineState is what `headrace up` knows of a worker of its own.
type EngineState struct {
	Name     string   `json:"name"`
	ID       string   `json:"id"` // in the registry
	Role     string   `json:"role"`
	GPUs     []string `json:"gpus"` // what it was given of Engines.Slots
	PID      int      `json:"pid"`  // 0 between two lives
	Stopping bool     `json:"stopping,omitempty"`
	LastLine string   `json:"last_line,omitempty"` // of its log
}

// Engines are all workers of a running `headrace up`.
type Engines struct {
	Slots   []string       `json:"slots"` // GPUs by name, or numbers where engines run on the CPU
	Each    map[string]int `json:"each"`  // of those, that an engine of a role takes
	Whole   bool           `json:"whole"` // all serve whole requests
	Engines []EngineState  `json:"engines"`
	// FreeRAM is what this machine has to spare, EngineRAM what a worker may come to take, in bytes; 0 is not known.
	FreeRAM   int64 `json:"free_ram,omitempty"`
	EngineRAM int64 `json:"engine_ram,omitempty"`
}

// EngineWish asks for one more.
type EngineWish struct {
	Name string   `json:"name"`
	Role string   `json:"role"`
	GPUs []string `json:"gpus"`
}

// What one of Headrace's own workers may come to take beside the model, whose file all share: its KV cache, by default so much, and the rest.
const (
	kvDefault = 512 << 20
	engineOwn = 64 << 20
)

// wishBytesMax bounds what is read of a wish.
const wishBytesMax = 64 << 10

// errNoWorker is the answer about a worker that there is not.
var errNoWorker = errors.New("there is no such worker")

// startPlanner opens the socket and starts the planner.
func (u *upper) startPlanner(model string) error {
	l, err := net.Listen("unix", u.dir.Socket("up"))
	if err != nil {
		return fmt.Errorf("open the planner's socket: %w", err)
	}
	if err := os.Chmod(u.dir.Socket("up"), 0o600); err != nil {
		return errors.Join(err, l.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /engines", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(u.engines()) })
	mux.HandleFunc("POST /engines", func(w http.ResponseWriter, r *http.Request) {
		var wish EngineWish
		if err := json.NewDecoder(io.LimitReader(r.Body, wishBytesMax)).Decode(&wish); err != nil {
			http.Error(w, "read the wish: "+err.Error(), http.StatusBadRequest)
			return
		}
		if err := u.startEngine(wish); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
		}
	})
	mux.HandleFunc("DELETE /engines/{name}", func(w http.ResponseWriter, r *http.Request) {
		if err := u.stopEngine(r.PathValue("name")); err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
		}
	})
	u.control.server = &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	go func() { _ = u.control.server.Serve(l) }()
	return u.startPart(u.layout.planner(model))
}

// startPart starts a part beside those that run.
func (u *upper) startPart(p part) error {
	if err := u.group.Start(p.spec); err != nil {
		return err
	}
	u.mu.Lock()
	u.parts = append(u.parts, p)
	u.mu.Unlock()
	return nil
}

// close has nothing more started.
func (c *control) close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	if c.server != nil {
		_ = c.server.Close()
	}
}

func (u *upper) engines() Engines {
	e := Engines{Slots: u.o.slots(), Whole: u.o.Prefill == 0, Each: map[string]int{"prefill": u.o.ranks("prefill"), "decode": u.o.ranks("decode")}, Engines: []EngineState{}}
	if u.o.Engine == nil { // of others nobody knows it
		kv := int64(u.o.KVMemory)
		if kv == 0 {
			kv = kvDefault
		}
		e.FreeRAM, e.EngineRAM = int64(hostmem.Available()), kv+engineOwn
	}
	pids := u.group.PIDs()
	for _, p := range u.list() {
		if p.kind == "worker" {
			e.Engines = append(e.Engines, EngineState{Name: p.spec.Name, ID: p.id, Role: p.role, GPUs: p.gpus, PID: pids[p.spec.Name], Stopping: p.stopping, LastLine: u.group.LastLine(p.spec.Name)})
		}
	}
	return e
}

// startEngine starts a worker; the same one twice is no error.
func (u *upper) startEngine(wish EngineWish) error {
	index, err := u.o.checkWish(wish)
	if err != nil {
		return err
	}
	u.control.mu.Lock()
	defer u.control.mu.Unlock()
	if u.control.closed {
		return errors.New("headrace up stops")
	}
	for _, p := range u.list() {
		switch {
		case p.kind != "worker":
		case p.spec.Name == wish.Name && slices.Equal(p.gpus, wish.GPUs) && !p.stopping:
			return nil
		case p.spec.Name == wish.Name:
			return fmt.Errorf("there is another %s", wish.Name)
		case slices.ContainsFunc(wish.GPUs, func(g string) bool { return slices.Contains(p.gpus, g) }):
			return fmt.Errorf("%s has some of the GPUs %s", p.spec.Name, strings.Join(wish.GPUs, ","))
		}
	}
	if err := u.startPart(u.layout.worker(wish.Role, index, wish.GPUs)); err != nil {
		return err
	}
	u.notePlanned()
	return nil
}

// checkWish says which number of its role the worker has.
func (o *Options) checkWish(w EngineWish) (index int, err error) {
	if w.Role != "prefill" && w.Role != "decode" || w.Role == "prefill" && o.Prefill == 0 {
		return 0, fmt.Errorf("role %q: there are prefill and decode, or decode alone where engines serve whole requests", w.Role)
	}
	_, number, _ := strings.Cut(w.Name, "-")
	index, err = strconv.Atoi(number)
	if err != nil || index < 0 || w.Name != o.workerName(w.Role, index) {
		return 0, fmt.Errorf("worker %q: one is called as %s", w.Name, o.workerName(w.Role, 0))
	}
	slots := o.slots()
	for i, g := range w.GPUs {
		if !slices.Contains(slots, g) || slices.Contains(w.GPUs[:i], g) {
			return 0, fmt.Errorf("GPU %q: there are %s, and each is given once", g, strings.Join(slots, ", "))
		}
	}
	if len(w.GPUs) != o.ranks(w.Role) {
		return 0, fmt.Errorf("%d GPUs for %s: it takes %d", len(w.GPUs), w.Name, o.ranks(w.Role))
	}
	return index, nil
}

// stopEngine has a worker end; it is listed, as stopping, until it has.
func (u *upper) stopEngine(name string) error {
	u.control.mu.Lock()
	defer u.control.mu.Unlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	i := slices.IndexFunc(u.parts, func(p part) bool { return p.kind == "worker" && p.spec.Name == name })
	switch {
	case i < 0:
		return errNoWorker
	case u.parts[i].stopping || u.control.closed: // then it ends with the others
		return nil
	}
	u.parts[i].stopping = true
	u.control.stops.Go(func() {
		u.group.Stop(u.o.Hard, name)
		u.mu.Lock()
		u.parts = slices.DeleteFunc(u.parts, func(p part) bool { return p.kind == "worker" && p.spec.Name == name })
		u.mu.Unlock()
		u.notePlanned()
	})
	return nil
}

// notePlanned has the state file written: its processes have changed.
func (u *upper) notePlanned() {
	select {
	case u.control.changed <- struct{}{}:
	default:
	}
}

// Control is a planner's side of the socket.
type Control struct{ client *http.Client }

// NewControl speaks with the `headrace up` whose socket lies at path.
func NewControl(path string) *Control {
	var d net.Dialer
	return &Control{&http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", path) },
	}}}
}

// Engines lists the workers.
func (c *Control) Engines(ctx context.Context) (*Engines, error) {
	e := new(Engines)
	return e, c.do(ctx, http.MethodGet, "/engines", nil, e)
}

// Start starts one; one that runs already, with the same name and GPUs, is no error.
func (c *Control) Start(ctx context.Context, w EngineWish) error {
	return c.do(ctx, http.MethodPost, "/engines", w, nil)
}

// Stop has one end, and does not wait for it.
func (c *Control) Stop(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/engines/"+url.PathEscape(name), nil, nil)
}

// Close gives the connections back.
func (c *Control) Close() { c.client.CloseIdleConnections() }

func (c *Control) do(ctx context.Context, method, path string, body, into any) error {
	var r io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = strings.NewReader(string(data))
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://up"+path, r)
	if err != nil {
		return err
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return fmt.Errorf("ask headrace up: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		words, _ := io.ReadAll(io.LimitReader(resp.Body, wishBytesMax))
		return fmt.Errorf("headrace up refuses: %s", strings.TrimSpace(string(words)))
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("read what headrace up says: %w", err)
	}
	return nil
}
