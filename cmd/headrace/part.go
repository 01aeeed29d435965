package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/headrace/headrace/internal/clusterauth"
	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
)

// withdrawTimeout bounds how long a part waits to be off the list before it stops: etcd may be gone.
const withdrawTimeout = 300 * time.Millisecond

// partFlags are those of every subcommand that is a part of its own: node, worker and router.
type partFlags struct {
	id       string
	dataDir  string
	listen   string
	etcd     []string
	parentFD int
	debug    bool
	ready    string
}

func (p *partFlags) add(fs *pflag.FlagSet, kind, listen string) {
	fs.StringVar(&p.id, "id", "", "name in the cluster (default HOST-"+kind+"-PORT)")
	addListen(fs, &p.listen, "listen", listen, "`address` to listen on, port 0 for any")
	addDataDir(fs, &p.dataDir)
	addEtcd(fs, &p.etcd, "etcd endpoints of the registry, `HOST:PORT,...`; none: not listed")
	fs.BoolVar(&p.debug, "debug", false, "open the debugging endpoints on the admin address")
	fs.StringVar(&p.ready, "ready-file", "", "write a JSON `file` once requests are served")
	fs.IntVar(&p.parentFD, "parent-fd", 0, "descriptor of the supervisor's pipe")
	_ = fs.MarkHidden("parent-fd")
}

func addDataDir(fs *pflag.FlagSet, dir *string) {
	def, err := supervise.DefaultDataDir()
	if err != nil {
		def = ""
	}
	fs.StringVar(dir, "data-dir", def, "`folder` for keys, sockets and logs")
}

func addTransport(fs *pflag.FlagSet, v *string) {
	fs.StringVar(v, "transport", "auto", "auto, tcp, shm or rdma: how KV cache moves")
}

func addKeyFile(fs *pflag.FlagSet, v *string) {
	fs.StringVar(v, "cluster-key-file", "", "`file` with the key that the cluster's routers and nodes share (default DATA-DIR/cluster.key)")
}

// addClusterKey is for commands that ask routers.
func addClusterKey(fs *pflag.FlagSet, v *string) {
	fs.StringVar(v, "cluster-key-file", "", "`file` with the key that routers on other hosts ask for (default DATA-DIR/cluster.key, if it is there)")
}

// withClusterKey is ctx with the key by which routers on other hosts answer; without one where there is no file. The data folder's is for
// what runs here.
func withClusterKey(ctx context.Context, file, dataDir string) (context.Context, error) {
	given := file != ""
	if !given {
		file = filepath.Join(dataDir, "cluster.key")
	}
	key, err := config.ReadKey(file)
	if err != nil && given && !errors.Is(err, fs.ErrPermission) { // what may name it is the machine's configuration, for whoever asks
		return nil, config.Misused(err)
	}
	return clusterauth.WithKey(ctx, key), nil
}

// running is what the headrace up in dataDir says of itself; where there is none, what says what to do.
func running(dataDir, what string) (*supervise.State, error) {
	s, err := supervise.ReadState(dataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("nothing runs in %s; %s", dataDir, what)
	}
	return s, err
}

// endpointsOf are etcd, or where none were given those of the headrace up in dataDir.
func endpointsOf(etcd []string, dataDir, what string) ([]string, error) {
	if len(etcd) > 0 {
		return etcd, nil
	}
	s, err := running(dataDir, what)
	if err != nil {
		return nil, err
	}
	return strings.Split(s.Etcd, ","), nil
}

// clusterKey reads the key; the one in the data folder is made when it is missing.
func clusterKey(file, dataDir string) ([]byte, error) {
	if file != "" {
		return config.ReadKey(file)
	}
	if err := os.MkdirAll(dataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make data folder: %w", err)
	}
	return config.EnsureKey(filepath.Join(dataDir, "cluster.key"))
}

func (a *app) logger() (*slog.Logger, error) {
	log, err := config.NewLogger(os.Stderr, a.logLevel, a.logFormat)
	return log, config.Misused(err)
}

// listenTCP opens an address, or takes the listener that the supervisor passed as fd:N.
func listenTCP(addr string) (net.Listener, error) {
	if n, ok := strings.CutPrefix(addr, "fd:"); ok {
		fd, err := strconv.Atoi(n)
		if err != nil || fd < 3 {
			return nil, config.Misused(fmt.Errorf("listen on %q: not a passed descriptor", addr))
		}
		f := os.NewFile(uintptr(fd), "listener")
		defer f.Close()
		l, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("listen on %q: %w", addr, err)
		}
		return l, nil
	}
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, config.Misused(fmt.Errorf("--listen %q: use HOST:PORT", addr))
	}
	return net.Listen("tcp", addr)
}

// defaultID names a part after its host and port, which no other part has at the same time.
func defaultID(id, kind, addr string) string {
	if id != "" {
		return id
	}
	_, port, _ := net.SplitHostPort(addr)
	return hostname() + "-" + kind + "-" + port
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return name
}

// signalled returns a context that ends at the first signal; the second one ends the process.
func signalled(cmd *cobra.Command, parentFD int, hangup bool) (context.Context, func()) {
	ctx, again, stop := supervise.Signals(supervise.WatchParent(cmd.Context(), parentFD), hangup)
	if parentFD > 0 {
		// A dying supervisor's threads each send the parent-death signal. In a hurry it kills for good.
		return ctx, stop
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-again:
			os.Exit(exitFailed)
		case <-done:
		}
	}()
	return ctx, func() { close(done); stop() }
}

// listed runs a part with a registry for it to list itself in; reg is nil when there is no etcd. The context that the
// part gets ends only when it is off the list again, so that nobody sends more to a part that stops.
func listed(ctx context.Context, etcd []string, log *slog.Logger, run func(ctx context.Context, reg *registry.Registry) error) (err error) {
	if len(etcd) == 0 {
		return run(ctx, nil)
	}
	reg, err := registry.Open(ctx, registry.Config{Endpoints: etcd, Logger: log})
	if err != nil {
		return err
	}
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		wctx, done := context.WithTimeout(inner, withdrawTimeout)
		defer done()
		_ = reg.Withdraw(wctx) // Close tries once more
		cancel()
	})
	defer stop()
	return errors.Join(run(inner, reg), reg.Close())
}
