package registry

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
)

// EmbeddedConfig says where the embedded etcd lives.
type EmbeddedConfig struct {
	Dir string // its data; made when missing
	// ClientAddr is where clients connect: host:port on loopback (port 0 for any) or unix:///path.
	// There is no authentication, so other addresses are refused; a cluster of hosts uses an etcd of its own.
	ClientAddr string
	LogFile    string        // etcd's warnings; "" for none
	Wait       time.Duration // how long it may take to come up; 20 s
}

// Embedded is an etcd of one member in this process.
type Embedded struct {
	etcd    *embed.Etcd
	logFile *os.File
	addr    string
}

// StartEmbedded starts etcd and waits until it serves.
func StartEmbedded(cfg EmbeddedConfig) (_ *Embedded, err error) {
	if cfg.Wait == 0 {
		cfg.Wait = 20 * time.Second
	}
	client, err := clientURL(cfg.ClientAddr)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make etcd's folder: %w", err)
	}
	em := &Embedded{}
	defer func() {
		if err != nil {
			err = errors.Join(err, em.Close())
		}
	}()
	logger := zap.NewNop()
	if cfg.LogFile != "" {
		if em.logFile, err = os.OpenFile(cfg.LogFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
			return nil, fmt.Errorf("open etcd's log: %w", err)
		}
		encoder := zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())
		logger = zap.New(zapcore.NewCore(encoder, zapcore.Lock(em.logFile), zap.WarnLevel))
	}
	if em.etcd, err = embed.StartEtcd(etcdConfig(cfg.Dir, client, logger)); err != nil {
		return nil, fmt.Errorf("start etcd in %s on %s: %w", cfg.Dir, cfg.ClientAddr, err)
	}
	select {
	case <-em.etcd.Server.ReadyNotify():
	case err := <-em.etcd.Err():
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	case <-time.After(cfg.Wait):
		return nil, fmt.Errorf("start etcd in %s: not ready within %s", cfg.Dir, cfg.Wait)
	}
	reserve(filepath.Join(cfg.Dir, "member", "snap", "db"))
	em.addr = cfg.ClientAddr
	if client.Scheme != "unix" {
		em.addr = em.etcd.Clients[0].Addr().String()
	}
	return em, nil
}

// reserveBytes is many times what a registry grows to.
const reserveBytes = 32 << 20

// reserve takes disk blocks for etcd's database beforehand. An etcd that cannot write ends its whole process, and a disk
// that others have filled up must not do that; its log takes its own blocks 64 MiB ahead. Where it cannot be done, the
// file system has no such call or no room, things are as they are.
func reserve(db string) {
	f, err := os.OpenFile(db, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer f.Close()
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, reserveBytes)
}

func etcdConfig(dir string, client *url.URL, logger *zap.Logger) *embed.Config {
	c := embed.NewConfig()
	c.Name = "headrace"
	c.Dir = dir
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger)
	c.ListenClientUrls = []url.URL{*client}
	// One member has no peers and listens for none; these addresses are only written into the member list.
	c.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:2379"}}
	c.ListenPeerUrls = nil
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:2380"}
	c.AdvertisePeerUrls = []url.URL{peer}
	c.InitialCluster = c.Name + "=" + peer.String()
	// With nobody to vote against, an election need not wait a second: this is most of the start.
	c.TickMs, c.ElectionMs = 20, 200
	// The registry is small and only its present state matters.
	c.AutoCompactionMode, c.AutoCompactionRetention = embed.CompactorModeRevision, "1000"
	c.SnapshotCount = 5000
	c.MaxSnapFiles, c.MaxWalFiles = 2, 2
	c.EnableGRPCGateway = false
	return c
}

func clientURL(addr string) (*url.URL, error) {
	if path, ok := strings.CutPrefix(addr, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return nil, fmt.Errorf("listen on %q: the path of a unix socket must be absolute", addr)
		}
		return &url.URL{Scheme: "unix", Path: path}, nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w", addr, err)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return nil, fmt.Errorf("listen on %q: the embedded etcd has no authentication, use a loopback address or an etcd of your own (--etcd)", addr)
	}
	return &url.URL{Scheme: "http", Host: addr}, nil
}

// Addr is where clients connect, with the real port.
func (e *Embedded) Addr() string { return e.addr }

// Err delivers what ended etcd, if it ends on its own.
func (e *Embedded) Err() <-chan error { return e.etcd.Err() }

// Close stops etcd. Its data stays for the next start.
func (e *Embedded) Close() error {
	if e.etcd != nil {
		e.etcd.Close()
		e.etcd = nil
	}
	if e.logFile != nil {
		defer func() { e.logFile = nil }()
		return e.logFile.Close()
	}
	return nil
}
