package router

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/internal/openai"
)

// certs is the certificate that clients are shown, as its files have it now. It is nil where there is no TLS. Safe for concurrent use.
type certs struct {
	certFile, keyFile string
	log               *slog.Logger
	cert              atomic.Pointer[tls.Certificate]
	failed            prometheus.Counter

	mu   sync.Mutex // guards what follows
	seen [2]os.FileInfo
}

// newCerts loads a certificate with its chain, and its key, both PEM. nil where no files are named.
func newCerts(cfg *Config) (*certs, error) {
	if cfg.TLSCert == "" {
		return nil, nil
	}
	c := &certs{certFile: cfg.TLSCert, keyFile: cfg.TLSKey, log: cfg.Logger, failed: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "headrace", Subsystem: "router",
		Name: "tls_handshake_failures_total", Help: "Connections that ended before TLS was agreed upon."})}
	if err := c.reload(); err != nil {
		return nil, err
	}
	cfg.Registry.MustRegister(c.failed, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "headrace", Subsystem: "router",
		Name: "tls_certificate_expiry_seconds", Help: "When the certificate ends that clients are shown, in seconds since 1970."}, func() float64 {
		return float64(c.cert.Load().Leaf.NotAfter.Unix())
	}))
	return c, nil
}

// reload reads the files again. If they cannot be used the certificate stays as it was.
func (c *certs) reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = c.stat() // before they are read: what is written meanwhile is another change
	cert, err := loadPair(c.certFile, c.keyFile)
	if err == nil {
		c.cert.Store(cert)
	}
	return err
}

func loadPair(certFile, keyFile string) (*tls.Certificate, error) {
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("load the TLS certificate %s with the key %s: %w", certFile, keyFile, err)
	}
	return &cert, nil
}

func (c *certs) stat() (seen [2]os.FileInfo) {
	seen[0], _ = os.Stat(c.certFile)
	seen[1], _ = os.Stat(c.keyFile)
	return seen
}

// look reads the files again if they are others than at the last look, or were changed.
func (c *certs) look() {
	now := c.stat()
	c.mu.Lock()
	seen := c.seen
	c.mu.Unlock()
	for i, is := range now {
		if !sameFile(is, seen[i]) {
			c.say(c.reload())
			return
		}
	}
}

func (c *certs) say(err error) {
	if err != nil {
		c.log.Error("the TLS certificate could not be read again: clients are shown the one before", "err", err)
		return
	}
	c.log.Info("TLS certificate read again", "file", c.certFile, "not_after", c.cert.Load().Leaf.NotAfter)
}

// ReloadTLS reads the certificate and its key again, as also happens by itself within seconds of a change. After an error clients are shown
// the one before. Without TLS it does nothing.
func (r *Router) ReloadTLS() error {
	if r.certs == nil {
		return nil
	}
	err := r.certs.reload()
	r.certs.say(err)
	return err
}

// server makes nc one that speaks TLS.
func (c *certs) server(nc net.Conn) net.Conn {
	return tls.Server(nc, &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.cert.Load(), nil }})
}

// handshake agrees upon TLS with the client, where there is any, within the time for a header. Who speaks plain HTTP is told so.
func (r *Router) handshake(c *clientConn) bool {
	if r.certs == nil {
		return true
	}
	conn, ok := c.Conn.(*tls.Conn)
	if !ok || conn.SetDeadline(time.Now().Add(r.cfg.HeaderTimeout)) != nil {
		return !ok
	}
	err := conn.HandshakeContext(r.base)
	if err == nil {
		return conn.SetDeadline(time.Time{}) == nil
	}
	r.certs.failed.Inc()
	var plain tls.RecordHeaderError
	if errors.As(err, &plain) && plain.Conn != nil && isMethod(plain.RecordHeader[:]) {
		e := openai.BadRequest("", "", "This port speaks HTTPS: ask https:// instead of http://.")
		body := e.AppendJSON(nil)
		_, _ = fmt.Fprintf(plain.Conn, "HTTP/1.1 400 Bad Request\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", contentJSON, len(body), body)
		_ = drainRead(plain.Conn)
	}
	return false
}

// isMethod tells whether bytes that are no TLS begin a request.
func isMethod(b []byte) bool {
	switch string(b) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		return true
	}
	return false
}

// drainRead takes what a client that is told to go away has sent: else the connection's reset could overtake the words.
func drainRead(c net.Conn) error {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
	_ = c.SetReadDeadline(time.Now().Add(lingerTimeout))
	_, err := io.CopyN(io.Discard, c, lingerBytes)
	return err
}

// checkTLS says what cannot be of the settings.
func (c *Config) checkTLS() error {
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return fmt.Errorf("configure router: tls-cert %q and tls-key %q: give both or none", c.TLSCert, c.TLSKey)
	}
	return nil
}
