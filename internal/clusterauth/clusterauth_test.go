package clusterauth

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

var key = []byte("a key of the cluster's")

// received is the request as a server sees it.
func received(t *testing.T, change func(*http.Request), at time.Time) *http.Request {
	t.Helper()
	sent := httptest.NewRequest(http.MethodGet, "http://10.0.0.1:9000/prefixes?of=tokens", nil)
	Sign(sent, key, at)
	got := httptest.NewRequest(http.MethodGet, "/prefixes?of=tokens", nil)
	got.Host = "10.0.0.1:9000"
	got.Header.Set("Authorization", sent.Header.Get("Authorization"))
	if change != nil {
		change(got)
	}
	return got
}

func TestCheck(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	for name, c := range map[string]struct {
		change func(*http.Request)
		at     time.Duration
		key    string
		want   error
	}{
		"good":           {},
		"a minute late":  {at: time.Minute},
		"a minute early": {at: -time.Minute},
		"too late":       {at: 61 * time.Second, want: ErrClock},
		"too early":      {at: -61 * time.Second, want: ErrClock},
		"another key":    {key: "of another cluster", want: ErrKey},
		"another host":   {change: func(r *http.Request) { r.Host = "10.0.0.2:9000" }, want: ErrKey},
		"another method": {change: func(r *http.Request) { r.Method = http.MethodPost }, want: ErrKey},
		"another target": {change: func(r *http.Request) { r.RequestURI = "/prefixes?of=bytes" }, want: ErrKey},
		"moved in time":  {change: func(r *http.Request) { swap(r, "t=1800000000", "t=1800000001") }, want: ErrKey},
		"none":           {change: func(r *http.Request) { r.Header.Del("Authorization") }, want: ErrMissing},
		"an API key":     {change: func(r *http.Request) { r.Header.Set("Authorization", "Bearer sk-1") }, want: ErrMissing},
		"no time":        {change: func(r *http.Request) { swap(r, "t=", "") }, want: ErrForm},
		"no MAC":         {change: func(r *http.Request) { swap(r, ",mac=", "") }, want: ErrForm},
		"half a MAC":     {change: func(r *http.Request) { swap(r, "mac=", "mac=zz") }, want: ErrForm},
		"an empty MAC": {change: func(r *http.Request) {
			r.Header.Set("Authorization", scheme+" t=1800000000,mac=")
		}, want: ErrKey},
	} {
		t.Run(name, func(t *testing.T) {
			k := key
			if c.key != "" {
				k = []byte(c.key)
			}
			if got := Check(received(t, c.change, now), k, now.Add(c.at)); !errors.Is(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

func swap(r *http.Request, old, with string) {
	r.Header.Set("Authorization", strings.Replace(r.Header.Get("Authorization"), old, with, 1))
}

// TestTransport: what a client sends a server takes.
func TestTransport(t *testing.T) {
	var got error
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = Check(r, key, time.Now()) }))
	defer srv.Close()
	tr := &Transport{Base: srv.Client().Transport}
	defer tr.CloseIdleConnections()
	for _, k := range []struct {
		key  []byte
		want error
	}{{nil, ErrMissing}, {key, nil}, {[]byte("other"), ErrKey}} {
		req, err := http.NewRequestWithContext(WithKey(t.Context(), k.key), http.MethodGet, srv.URL+"/status?a=b%20c&d", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: tr}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if !errors.Is(got, k.want) {
			t.Errorf("key %q: %v, want %v", k.key, got, k.want)
		}
	}
}

// FuzzCheck: no header is taken that was not signed with the key.
func FuzzCheck(f *testing.F) {
	for _, s := range []string{"", "Headrace-Cluster t=1800000000,mac=00", "Headrace-Cluster t=,mac=", "headrace-cluster t=-1,mac=ff,mac=00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		r := httptest.NewRequest(http.MethodGet, "/status", nil)
		r.Header = http.Header{"Authorization": {header}}
		if Check(r, key, time.Unix(1_800_000_000, 0)) == nil {
			t.Errorf("%q is taken", header)
		}
	})
}
