package router

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/headrace/headrace/router/prefix"
	"github.com/headrace/headrace/router/routertest"
)

// What workers have of a prompt can be asked without serving it.
func TestPrefixesAreExplained(t *testing.T) {
	h := start(t, func(c *Config) {
		joint(c)
		c.Tokens = map[string]Tokens{"fake": fakeTokens{}}
		c.MaxBodyBytes = 1 << 16
	}, whole("d1", "d2")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	post := func(query, body string) (int, string) {
		t.Helper()
		resp, err := h.client.Post("http://"+ln.Addr().String()+"/debug/prefixes"+query, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		said, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(said)
	}
	q := ask{prompt: strings.Repeat("so many words ", 400), n: 2}
	served := h.where(q, nil)
	for query, exact := range map[string]bool{"": true, "?path=/v1/chat/completions": true} {
		code, said := post(query, q.body())
		var got PrefixAnswer
		if err := json.Unmarshal([]byte(said), &got); code != http.StatusOK || err != nil || len(got.Workers) != 2 {
			t.Fatalf("%q: %d %s, %v", query, code, said, err)
		}
		if got.Tokens != 1200 || got.Exact != exact {
			t.Errorf("%q: %+v", query, got)
		}
		for _, w := range got.Workers {
			if (w.Cached >= 1000) != (w.ID == served) || !w.Approximate {
				t.Errorf("%s served it, and of %s is said %+v", served, w.ID, w)
			}
		}
	}
	if n := len(h.r.decisions.list("")); n != 1 {
		t.Errorf("%d requests were decided about, want one", n)
	}
	for body, want := range map[string]int{"{": 400, `{"model":"fake"}`: 400, `{"model":"fake","prompt":"` + strings.Repeat("x", 1<<16) + `"}`: http.StatusRequestEntityTooLarge} {
		if code, said := post("", body); code != want {
			t.Errorf("%.40s: %d %s, want %d", body, code, said, want)
		}
	}
	if st := h.r.Status(); st.Prefixes == nil || len(st.Prefixes.Sources) == 0 {
		t.Errorf("status: %+v", st.Prefixes)
	}
}

// A router that is started beside another one knows what that one does.
func TestAnotherRouterBeginsWarm(t *testing.T) {
	tokens := func(c *Config) {
		joint(c)
		c.Tokens = map[string]Tokens{"fake": fakeTokens{}}
	}
	h := start(t, tokens, whole("d1", "d2")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	served := h.where(ask{prompt: strings.Repeat("so many words ", 400), n: 2}, nil)
	if _, err := FetchPrefixes(t.Context(), ln.Addr().String(), "nothing", routertest.Key); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("an index that there is not: %v", err)
	}
	for name, warm := range map[string]func(context.Context, string) (io.ReadCloser, error){
		"from the first": func(ctx context.Context, of string) (io.ReadCloser, error) {
			return FetchPrefixes(ctx, ln.Addr().String(), of, routertest.Key)
		},
		"from none": func(context.Context, string) (io.ReadCloser, error) { return nil, errors.New("nobody") },
		"from a stub": func(context.Context, string) (io.ReadCloser, error) {
			return io.NopCloser(strings.NewReader("HR")), nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Source: h.r.cfg.Source, ClusterKey: h.r.cfg.ClusterKey, Warm: warm}
			tokens(&cfg)
			r, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := r.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
			}()
			ids := make([]uint32, 0, 1200)
			for range 400 {
				ids = append(ids, 2, 4, 5)
			}
			got := r.prompts.index.Lookup(ids, prefix.Seed{}, []string{"d1", "d2"}, nil)
			for i, m := range got {
				if want := name == "from the first" && served == []string{"d1", "d2"}[i]; (m.Tokens >= 1000) != want {
					t.Errorf("%s served it, and of d%d is known %+v", served, i+1, m)
				}
			}
		})
	}
}

func TestPrefixesOfAPolicyWithoutThem(t *testing.T) {
	h := start(t, nil, whole("d1")...)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = h.r.ServeAdmin(ln) }()
	resp, err := h.client.Post("http://"+ln.Addr().String()+"/debug/prefixes", "application/json", strings.NewReader(ask{n: 1}.body()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	said, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusNotFound || !strings.Contains(string(said), "least-loaded") || h.r.Status().Prefixes != nil {
		t.Errorf("%d %s", resp.StatusCode, said)
	}
}
