package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/headrace/headrace/internal/config"
	"github.com/headrace/headrace/internal/doctor"
	"github.com/headrace/headrace/internal/version"
)

// examiner is this host for others.
func examiner(name string) doctor.Examiner {
	return doctor.Examiner{Root: os.DirFS("/"), Host: name, Build: version.Get().Version}
}

func (a *app) doctor() *cobra.Command {
	var (
		asJSON                                     bool
		transport, peer, serve, keyFile, dir, name string
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Show what this build and this host can do, and how to change what they cannot",
		Long: `Doctor looks at this build and this host and says of each thing yes, no or unknown. To what is missing it says what to
do, and where a command does it the command: for root's shell ("#"), with what is to be filled in in capitals.

With --peer it examines another host as well: any node daemon that holds the same cluster key answers, and where none
runs, headrace doctor --serve does. The two compare MTUs, addresses, clocks and versions, and over RDMA they write 4 MiB from
port to port and compare what arrived. A command for the other host is printed behind that host's name.

The exit status is 0, or 1 when something is missing that is needed; with --transport rdma that is all RDMA does not work without.`,
		Example: `  headrace doctor
  headrace doctor --transport rdma --json
  headrace doctor --peer 10.0.0.7:7001 --cluster-key-file /etc/headrace/cluster.key`,
	}
	fs := cmd.Flags()
	fs.BoolVar(&asJSON, "json", false, "print one JSON document")
	addTransport(fs, &transport)
	addPeer(fs, &peer, "peer", "`HOST:PORT` of another host's node daemon, to be examined with this one")
	addListen(fs, &serve, "serve", "", "answer examinations at this `HOST:PORT`, where no node daemon runs, until interrupted")
	fs.StringVar(&name, "id", "", "what this host is called at the other (default: its name)")
	addKeyFile(fs, &keyFile)
	addDataDir(fs, &dir)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if name == "" {
			name = hostname()
		}
		if peer != "" && serve != "" {
			return config.Misused(errors.New("--peer and --serve are for the two ends: give one of them"))
		}
		ctx, stop := signalled(cmd, 0, terminal())
		defer stop()
		if serve != "" {
			return a.serveExams(ctx, serve, name, keyFile, dir)
		}
		var key []byte
		if peer != "" {
			var err error
			if key, err = peerKey(keyFile, dir); err != nil {
				return err
			}
		}
		r := doctor.Run(os.DirFS("/"))
		if peer != "" {
			(&doctor.Peer{Examiner: examiner(name), Addr: peer, Key: key}).Examine(ctx, r)
		}
		if transport == "rdma" {
			r.NeedRDMA()
		}
		if err := r.Print(a.out, asJSON); err != nil {
			return err
		}
		if !r.OK() {
			return errors.New("something that is needed is missing, see above")
		}
		return nil
	}
	return cmd
}

// peerKey reads the cluster's key; a new one would fit no peer.
func peerKey(file, dir string) ([]byte, error) {
	if file == "" {
		file = filepath.Join(dir, "cluster.key")
	}
	key, err := config.ReadKey(file)
	if err != nil {
		return nil, fmt.Errorf("%w; give the cluster's key with --cluster-key-file", err)
	}
	return key, nil
}

// serveExams stands in for a node daemon.
func (a *app) serveExams(ctx context.Context, addr, name, keyFile, dir string) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	key, err := clusterKey(keyFile, dir)
	if err != nil {
		return err
	}
	l, err := listenTCP(addr)
	if err != nil {
		return err
	}
	log.Info("waiting to be examined; end it with Ctrl-C", "addr", l.Addr().String())
	x := examiner(name)
	return x.Listen(ctx, l, key, log)
}
