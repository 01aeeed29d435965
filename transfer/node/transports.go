package node

import (
	"fmt"
	"net"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/tcp"
)

// newEngine starts the data plane with the transports asked for.
func newEngine(cfg Config, m *metrics, l net.Listener) (*transfer.Engine, error) {
	transports := cfg.Transports
	if len(transports) == 0 {
		transports = []transfer.Transport{shm.New(), tcp.New(tcp.Config{Congestion: cfg.Congestion})} // the local copy where it applies
		if cfg.Transport == "rdma" && cfg.RDMA != nil {
			// Not in "auto" yet: a region that cannot be registered has nothing to fall back to.
			transports = append(transports, cfg.RDMA())
		}
	}
	sum, err := transfer.ParseChecksum(cfg.Checksum)
	if err != nil {
		return nil, err
	}
	tc := transfer.Config{
		NodeID: cfg.NodeID, Epoch: cfg.Epoch, ClusterKey: cfg.ClusterKey, Listen: cfg.Listen, Advertise: cfg.Advertise,
		Transports: transports, Transport: cfg.Transport, Lanes: cfg.Lanes, RateLimit: cfg.RateLimit, Checksum: sum, Method: cfg.Method,
		Listener: l, Successor: cfg.Takeover,
		PingInterval: cfg.PingInterval, DeadAfter: cfg.Silence, Limits: cfg.Limits, Logger: cfg.Logger, Metrics: m,
	}
	if cfg.Debug {
		tc.Pauses = transfer.NewPauses()
	}
	eng, err := transfer.New(tc)
	if err != nil {
		return nil, fmt.Errorf("start data plane: %w", err)
	}
	return eng, nil
}
