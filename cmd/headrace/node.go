package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/supervise"
	"github.com/headrace/headrace/internal/version"
	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer/node"
	"github.com/headrace/headrace/transfer/telemetry"
)

func (a *app) node() *cobra.Command {
	var (
		p       partFlags
		cfg     node.Config
		keyFile string
		rate    config.Size
		uids    []uint
		ports   rdmaFlags
	)
	cmd := &cobra.Command{
		Use:     "node",
		Short:   "Run a node daemon, which moves KV cache for this host's workers",
		Example: `  headrace node --etcd 10.0.0.1:2379 --listen 10.0.0.7:7001 --cluster-key-file /etc/headrace/cluster.key`,
	}
	fs := cmd.Flags()
	p.add(fs, "node", "127.0.0.1:0")
	fs.StringVar(&cfg.Socket, "socket", "", "`path` of the unix socket for workers (default DATA-DIR/node.sock)")
	fs.DurationVar(&cfg.Spin, "spin", 0, "how `long` to look for an engine's next push, where they come that often, before sleeping; negative: never (default 100us)")
	addPeer(fs, &cfg.Advertise, "advertise", "`HOST:PORT` that other nodes connect to, when --listen is not it")
	addListen(fs, &cfg.Admin, "admin", "127.0.0.1:0", "`address` of /metrics, /status and /healthz; it has no access control")
	fs.IntVar(&cfg.Lanes, "lanes", 0, "streams of a channel (default: the daemon's choice)")
	fs.StringVar(&cfg.Checksum, "checksum", "sampled", "which `pieces` are sent with a checksum that the other end verifies: off, sampled (1 in 64), always or 1/N")
	fs.StringVar(&cfg.Congestion, "tcp-congestion", "", "congestion control of TCP lanes, host for the host's own (default: the host's own, but cubic on loopback)")
	fs.StringVar(&cfg.Method, "method", "auto", "how scattered bytes get to the network: direct, staged through a buffer, or auto, as measured for each size")
	fs.StringVar(&cfg.Telemetry, "telemetry", "auto", "what counts bytes, retransmissions and packets of lanes: ebpf, kernel (TCP_INFO and the devices' counters), auto (ebpf where it is allowed) or off")
	fs.Var(&rate, "rate", "limit of bytes sent in a second, as 1GiB; 0 for none")
	fs.UintSliceVar(&uids, "allow-uid", nil, "users beside this one and root whose workers may connect")
	fs.BoolVar(&cfg.Takeover, "takeover", false, "take the place of the daemon that serves --socket, whose workers come over and go on")
	addSpan(fs, &cfg.DrainTimeout, "drain-timeout", time.Minute, "how long transfers may go on here once another daemon took over")
	addTransport(fs, &cfg.Transport)
	ports.add(fs)
	addKeyFile(fs, &keyFile)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if cfg.Logger, err = a.logger(); err != nil {
			return err
		}
		settings, err := ports.config()
		if err != nil {
			return err
		}
		settings.Logger = cfg.Logger
		if cfg.Socket == "" {
			cfg.Socket = filepath.Join(p.dataDir, "node.sock")
		}
		cfg.NodeID, cfg.Listen, cfg.Debug, cfg.RateLimit = p.id, p.listen, p.debug, int64(rate)
		if cfg.NodeID == "" {
			cfg.NodeID = hostname()
		}
		for _, u := range uids {
			cfg.AllowUIDs = append(cfg.AllowUIDs, uint32(u))
		}
		if err := cfg.Validate(); err != nil {
			return config.Misused(err)
		}
		if cfg.ClusterKey, err = clusterKey(keyFile, p.dataDir); err != nil {
			return err
		}
		cfg.Build = version.Get().Version
		exam := examiner(cfg.NodeID)
		cfg.Examiner = exam.Serve
		ctx, stop := signalled(cmd, p.parentFD, terminal())
		defer stop()
		defer upgradeOnRequest(ctx, p.parentFD, cfg.Logger)()
		cfg.RDMA, cfg.Posts = rdma.Maker(settings), posts()
		return a.runNode(ctx, &p, &cfg)
	}
	return cmd
}

// runNode runs the daemon, in the registry if there is one.
func (a *app) runNode(ctx context.Context, p *partFlags, cfg *node.Config) error {
	return listed(ctx, p.etcd, cfg.Logger, func(ctx context.Context, reg *registry.Registry) error {
		var kept *registry.Announcement
		if reg != nil {
			cfg.Peers = decodePeers(ctx, reg, cfg.NodeID, cfg.Logger)
		}
		cfg.OnReady = func(r node.Ready) { kept = a.nodeReady(ctx, reg, p, cfg, r) }
		cfg.OnHandedOver = func() {
			if kept != nil { // the successor's entry stays: it has another lease
				_ = kept.Close()
			}
		}
		return node.Run(ctx, *cfg)
	})
}

// posts are where RDMA work passes in this program.
func posts() telemetry.Posts {
	e := rdma.EntryPoints()
	return telemetry.Posts{Post: e.Post, Poll: e.Poll}
}

// decodePeers follows the registry for a daemon with prefill workers: it gives the daemons of those workers that decode
// for the same model.
func decodePeers(ctx context.Context, reg *registry.Registry, self string, log *slog.Logger) <-chan map[string]string {
	out := make(chan map[string]string)
	go func() {
		table, err := reg.Watch(ctx)
		if err != nil {
			log.Warn("channels are set up when they are first needed", "err", err)
			return
		}
		for {
			changed := table.Changed()
			select {
			case <-ctx.Done():
				return
			case out <- peersOf(table.Snapshot(), self):
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
		}
	}()
	return out
}

// peersOf names the daemons of the workers that those of this daemon may prefill for, with their data addresses.
func peersOf(v *registry.View, self string) map[string]string {
	models := make(map[string]bool)
	for _, w := range v.Workers {
		if w.NodeID == self && w.Role != registry.RoleDecode {
			models[w.Fingerprint] = true
		}
	}
	peers := make(map[string]string)
	for _, w := range v.Workers {
		if w.NodeID != self && w.NodeData != "" && w.Role != registry.RolePrefill && models[w.Fingerprint] {
			peers[w.NodeID] = w.NodeData
		}
	}
	return peers
}

// listedWait bounds how long a successor's predecessor waits for it to be in the registry: etcd may be away.
const listedWait = 2 * time.Second

func (a *app) nodeReady(ctx context.Context, reg *registry.Registry, p *partFlags, cfg *node.Config, r node.Ready) (kept *registry.Announcement) {
	if reg != nil {
		transports := []string{cfg.Transport}
		if cfg.Transport == "auto" {
			transports = []string{"shm", "tcp"}
		}
		var err error
		kept, err = reg.Keep(registry.KindNode, r.NodeID, registry.Node{
			ID: r.NodeID, Epoch: r.Epoch, PID: r.PID, Host: hostname(), DataAddr: r.DataAddr, Socket: r.Socket, Admin: r.Admin,
			Transports: transports, Started: time.Now(),
		})
		if err != nil {
			cfg.Logger.Error("node is not listed", "err", err)
		} else if cfg.Takeover {
			timer := time.NewTimer(listedWait)
			defer timer.Stop()
			select {
			case <-kept.Listed():
			case <-timer.C:
			case <-ctx.Done():
			}
		}
	}
	if err := supervise.WriteReady(p.ready, os.Getpid(), r.Admin); err != nil {
		cfg.Logger.Error("no ready file", "err", err)
	}
	if err := supervise.NotifySystemd(os.Getpid()); err != nil {
		cfg.Logger.Warn("systemd does not know that this is the main process", "err", err)
	}
	return kept
}
