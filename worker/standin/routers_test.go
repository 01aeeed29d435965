package standin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headrace/headrace/router"
	"github.com/headrace/headrace/router/pairing"
	"github.com/headrace/headrace/router/tokenize"
)

type still []pairing.Worker

func (f still) Workers() []pairing.Worker { return f }
func (still) Changed() <-chan struct{}    { return nil }

// Two routers in front of the same engines come to know the same of them, whichever of them a request went through.
func TestRoutersConverge(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	listen := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	table := DefaultTable()
	table.Prefill, table.Decode = []PrefillRow{{0, 0}, {1, 0.0001}, {2048, 0.0002}}, []DecodeRow{{1, 0, 0.0001}}
	table.Blocks = 300 // so that conversations drive each other out
	var workers still
	for i := range 2 {
		s := &Server{Listener: listen(), Events: listen(), EventsReplay: listen(), Config: Config{Model: "m", Role: "both", Table: table}}
		workers = append(workers, pairing.Worker{ID: fmt.Sprint("w", i), Role: pairing.RoleBoth, Model: "m", Addr: s.Listener.Addr().String(), Dialect: pairing.DialectPlain, Incarnation: "1",
			BlockTokens: uint32(table.BlockTokens), Blocks: uint32(table.Blocks), ContextTokens: uint32(table.Context), TensorParallel: 1,
			Events: s.Events.Addr().String(), EventsReplay: s.EventsReplay.Addr().String()})
		running.Go(func() {
			if err := s.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	dir := t.TempDir()
	if err := WriteTokenizer(dir); err != nil {
		t.Fatal(err)
	}
	tok, err := tokenize.Load(dir, tokenize.Options{})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	var fronts, admins []string
	for range 2 {
		r, err := router.New(router.Config{Source: workers, ClusterKey: make([]byte, 32), Policy: &pairing.Joint{}, Tokens: map[string]router.Tokens{"": tok}})
		if err != nil {
			t.Fatal(err)
		}
		front, admin := listen(), listen()
		fronts, admins = append(fronts, front.Addr().String()), append(admins, admin.Addr().String())
		running.Go(func() { _ = r.Serve(front) })
		running.Go(func() { _ = r.ServeAdmin(admin) })
		defer func() {
			if err := r.Shutdown(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		}()
	}
	post := func(url string, body []byte, into any) error {
		resp, err := client.Post(url, "application/json", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return json.NewDecoder(resp.Body).Decode(into)
	}
	var bodies [][]byte
	for i := range 24 {
		body := fmt.Appendf(nil, `{"model":"m","max_tokens":3,"prompt":"talk %d %s"}`, i%8, strings.Repeat(fmt.Sprint(" turn ", i%8), 40+20*(i/8)))
		bodies = append(bodies, body)
		var answer json.RawMessage
		if err := post("http://"+fronts[i%2]+"/v1/completions", body, &answer); err != nil {
			t.Fatal(err)
		}
	}
	// What both say of all prompts, once all events are there.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var said [2][]router.PrefixAnswer
		known := 0
		for k, admin := range admins {
			for _, body := range bodies[16:] {
				var page router.PrefixAnswer
				if err := post("http://"+admin+"/debug/prefixes", body, &page); err != nil {
					t.Fatal(err)
				}
				said[k] = append(said[k], page)
				for _, w := range page.Workers {
					if page.Exact && !w.Approximate && w.Cached > 0 {
						known++
					}
				}
			}
		}
		same := slices.EqualFunc(said[0], said[1], func(a, b router.PrefixAnswer) bool { return a.Tokens == b.Tokens && slices.Equal(a.Workers, b.Workers) })
		if same && known >= 2*8 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d known: %+v and %+v", known, said[0], said[1])
		}
	}
}
