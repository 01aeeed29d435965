package router

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/router/routertest"
)

// writeCert writes a certificate for 127.0.0.1 of its own making and its key into dir. The pool has it.
func writeCert(t *testing.T, dir string, serial int64) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "router"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(leaf)
	return certFile, keyFile, pool
}

// secured runs a router that speaks TLS, and has the harness's client speak it.
func secured(t *testing.T, change func(*Config), ws ...*routertest.Worker) (h *harness, dir string) {
	t.Helper()
	dir = t.TempDir()
	certFile, keyFile, pool := writeCert(t, dir, 1)
	h = start(t, func(c *Config) {
		if c.TLSCert, c.TLSKey = certFile, keyFile; change != nil {
			change(c)
		}
	}, ws...)
	h.client.Transport = toTLS{&http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	t.Cleanup(h.client.CloseIdleConnections)
	return h, dir
}

// toTLS asks by https what it is to ask by http.
type toTLS struct{ *http.Transport }

func (t toTLS) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = "https"
	return t.Transport.RoundTrip(r)
}

// TestTLS: requests of all sorts, one behind the other on a connection, clients that leave, and those that speak no TLS.
func TestTLS(t *testing.T) {
	h, _ := secured(t, nil, pair("p1", "d1")...)
	for i := range 6 {
		q := ask{n: 5, stream: i%2 == 0, usage: i%4 == 0, prompt: strings.Repeat("many words ", 1+i*4000)}
		h.do(q).wantWhole(t, q)
	}
	if n := h.r.Status().Conns; n != 1 {
		t.Errorf("%d connections", n)
	}
	c, err := net.Dial("tcp", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_, _ = io.WriteString(c, post(ask{n: 2}.body()))
	if got, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 400 ") || !strings.Contains(string(got), "https://") {
		t.Errorf("who speaks plain HTTP gets %q, %v", got, err)
	}
	if n := value(h.r.certs.failed); n != 1 {
		t.Errorf("%v failed handshakes are counted", n)
	}
}

// TestTLSLeaves: a client that leaves in mid-stream ends its request.
func TestTLSLeaves(t *testing.T) {
	ws := pair("d1")
	ws[0].Fault = func(_ *routertest.Call, stage string, n int) routertest.Action {
		if stage == routertest.StageToken && n == 2 {
			return routertest.Wait
		}
		return routertest.Go
	}
	h, _ := secured(t, nil, ws...)
	resp, err := h.client.Post("http://"+h.addr+"/v1/chat/completions", "application/json", strings.NewReader(ask{n: 9, stream: true}.body()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 50)); err != nil {
		t.Fatal(err)
	}
	h.until("decode to have begun", func() bool { return value(h.r.metrics.phases[stateDecoding]) == 1 }) // prefill's token comes before
	_ = resp.Body.Close()
	h.until("the request to be cancelled", func() bool {
		return value(h.r.metrics.cancels.WithLabelValues("decoding", "client_gone")) == 1
	})
}

// TestTLSReload: a certificate that was replaced is shown to whoever comes then; one that cannot be used is not.
func TestTLSReload(t *testing.T) {
	h, dir := secured(t, nil, pair("d1")...)
	serial := func() int64 {
		t.Helper()
		c, err := tls.Dial("tcp", h.addr, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if got := c.ConnectionState().NegotiatedProtocol; got != "" {
			t.Errorf("protocol %q", got)
		}
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if n := serial(); n != 1 {
		t.Errorf("serial %d", n)
	}
	certFile, _, _ := writeCert(t, dir, 2)
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(certFile, later, later); err != nil {
		t.Fatal(err)
	}
	h.r.certs.look()
	if n := serial(); n != 2 {
		t.Errorf("serial %d behind a change", n)
	}
	if err := os.WriteFile(certFile, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.r.ReloadTLS(); err == nil || !strings.Contains(err.Error(), certFile) {
		t.Errorf("%v", err)
	}
	if n := serial(); n != 2 {
		t.Errorf("serial %d behind a broken file", n)
	}
}

// TestTLSSilent: who says nothing has the time of a header for it.
func TestTLSSilent(t *testing.T) {
	h, _ := secured(t, func(c *Config) { c.HeaderTimeout = 50 * time.Millisecond }, pair("d1")...)
	c, err := net.Dial("tcp", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func TestTLSChecks(t *testing.T) {
	if err := (Config{MaxBodyBytes: 1, TLSCert: "x"}).Validate(); err == nil || !strings.Contains(err.Error(), "give both") {
		t.Errorf("%v", err)
	}
	_, err := New(Config{Source: &fleetSource{changed: make(chan struct{})}, ClusterKey: routertest.Key, TLSCert: "/nowhere/c.pem", TLSKey: "/nowhere/k.pem"})
	if err == nil || !strings.Contains(err.Error(), "/nowhere/c.pem") {
		t.Errorf("%v", err)
	}
}
