// Package clusterauth shows by a request's header that who sends it holds the cluster's key, without sending the key.
//
// The header Authorization has a time and a MAC (HMAC-SHA256) over that time, the method, the host asked and the target. So it is of no
// use for another request, at another router, or a minute later. What is behind it is asked for by GET and changes nothing: to hear it twice tells a
// listener no more than to hear it once. It encrypts nothing.
package clusterauth

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	scheme = "Headrace-Cluster"
	domain = "headrace cluster request 1" // apart from what else is made with the key
	// skewMax is how far two hosts' clocks may be apart, and how long a header is good for.
	skewMax = time.Minute
)

// Why Check refuses.
var (
	ErrMissing = errors.New("the request does not show the cluster key")
	ErrForm    = errors.New("the request's Authorization is not one that headrace makes")
	ErrClock   = errors.New("the request's time is more than a minute away from this host's: set the clocks")
	ErrKey     = errors.New("the request was made with another cluster key")
)

// Sign sets req's Authorization.
func Sign(req *http.Request, key []byte, now time.Time) {
	host := req.Host
	if host == "" {
		host = req.URL.Host
	}
	at := now.Unix()
	req.Header.Set("Authorization", fmt.Sprintf("%s t=%d,mac=%s", scheme, at, hex.EncodeToString(mac(key, at, req.Method, host, req.URL.RequestURI()))))
}

// Check judges the Authorization of a request that was received. The error is one of this package's.
func Check(req *http.Request, key []byte, now time.Time) error {
	said, rest, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	if !strings.EqualFold(said, scheme) {
		return ErrMissing
	}
	when, digits, ok := strings.Cut(strings.TrimPrefix(rest, "t="), ",mac=")
	at, err := strconv.ParseInt(when, 10, 64)
	sum, hexErr := hex.DecodeString(digits)
	if !ok || err != nil || hexErr != nil || !strings.HasPrefix(rest, "t=") {
		return ErrForm
	}
	if !hmac.Equal(sum, mac(key, at, req.Method, req.Host, req.RequestURI)) {
		return ErrKey
	}
	if off := now.Unix() - at; off > int64(skewMax/time.Second) || off < -int64(skewMax/time.Second) {
		return ErrClock
	}
	return nil
}

func mac(key []byte, at int64, method, host, target string) []byte {
	h := hmac.New(sha256.New, key)
	for _, part := range []string{domain, strconv.FormatInt(at, 10), method, host, target} {
		_, _ = fmt.Fprintf(h, "%d:%s\n", len(part), part) // never fails
	}
	return h.Sum(nil)
}

type keyOf struct{}

// WithKey is a context whose requests Transports sign.
func WithKey(ctx context.Context, key []byte) context.Context {
	return context.WithValue(ctx, keyOf{}, key)
}

// Transport signs requests whose context has a key. Safe for concurrent use.
type Transport struct {
	Base http.RoundTripper // nil: http.DefaultTransport
}

// RoundTrip signs a copy of req, unless it has an Authorization already.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	if key, _ := req.Context().Value(keyOf{}).([]byte); len(key) > 0 && req.Header.Get("Authorization") == "" {
		req = req.Clone(req.Context())
		Sign(req, key, time.Now())
	}
	return base.RoundTrip(req)
}

// CloseIdleConnections closes those of Base.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.Base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}
