package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/headrace/headrace/internal/clusterauth"
	"github.com/headrace/headrace/router/prefix"
)

// PathPrefixes is the admin page that gives what a router knows of workers' caches to another one, as a snapshot of one of
// its indexes: ?of=tokens or ?of=bytes.
const PathPrefixes = "/prefixes"

const (
	// snapshotTimeout bounds the wait for another router's snapshot: this one does not serve before.
	snapshotTimeout = 10 * time.Second
	ofTokens        = "tokens"
	ofBytes         = "bytes"
)

// indexes are both, by the names under which they are shown.
func (p *prompts) indexes() map[string]*prefix.Index {
	return map[string]*prefix.Index{ofTokens: p.index, ofBytes: p.guesses}
}

// servePrefixes writes a snapshot.
func (r *Router) servePrefixes(w http.ResponseWriter, req *http.Request) {
	var x *prefix.Index
	if r.prompts != nil {
		x = r.prompts.indexes()[req.URL.Query().Get("of")]
	}
	if x == nil {
		http.Error(w, fmt.Sprintf("no such index here: say ?of=%s or ?of=%s of a router whose policy looks at prefixes", ofTokens, ofBytes), http.StatusNotFound)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(snapshotTimeout))
	w.Header().Set("Content-Type", "application/octet-stream")
	if err := x.Save(w); err != nil { // most of it may have gone out: the reader sees that its end is missing
		r.log.Debug("give a snapshot of the prefix index", "err", err)
	}
}

// warm takes over what another router knows. Whatever cannot be had is learned anew.
func (p *prompts) warm(fetch func(ctx context.Context, of string) (io.ReadCloser, error)) error {
	ctx, cancel := context.WithTimeout(context.Background(), snapshotTimeout)
	defer cancel()
	var errs []error
	for name, x := range p.indexes() {
		body, err := fetch(ctx, name)
		if err == nil {
			err = errors.Join(x.Load(body), body.Close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// FetchPrefixes gets a snapshot from the router whose admin page is at addr (host:port), to which it shows that it has the cluster's key: what
// Config.Warm is to do.
func FetchPrefixes(ctx context.Context, addr, of string, key []byte) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+PathPrefixes+"?of="+of, nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	clusterauth.Sign(req, key, time.Now())
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		words, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		_ = resp.Body.Close()
		return nil, fmt.Errorf("get the prefix index of the router at %s: %s: %s", addr, resp.Status, bytes.TrimSpace(words))
	}
	return resp.Body, nil
}
