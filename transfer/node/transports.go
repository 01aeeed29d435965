package node

import (
	"errors"
	"fmt"
	"net"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/shm"
	"github.com/headrace/headrace/transfer/tcp"
	"github.com/headrace/headrace/transfer/telemetry"
)

// newEngine starts the data plane with the transports asked for, and what measures it from outside; nil: nothing does.
func newEngine(cfg Config, m *metrics, l net.Listener) (_ *transfer.Engine, _ *telemetry.Telemetry, err error) {
	transports := cfg.Transports
	if len(transports) == 0 {
		transports = append(transports, shm.New()) // the local copy where it applies
		if cfg.RDMA != nil && (cfg.Transport == "" || cfg.Transport == "auto" || cfg.Transport == "rdma") {
			transports = append(transports, cfg.RDMA())
		}
		transports = append(transports, tcp.New(tcp.Config{Congestion: cfg.Congestion})) // and the last rail
	}
	defer func() {
		if err != nil { // the engine would have: a transport may have changed the host, and is to put it back
			for _, t := range transports {
				err = errors.Join(err, t.Close())
			}
		}
	}()
	sum, err := transfer.ParseChecksum(cfg.Checksum)
	if err != nil {
		return nil, nil, err
	}
	tc := transfer.Config{
		NodeID: cfg.NodeID, Epoch: cfg.Epoch, ClusterKey: cfg.ClusterKey, Listen: cfg.Listen, Advertise: cfg.Advertise,
		Transports: transports, Transport: cfg.Transport, Lanes: cfg.Lanes, RateLimit: cfg.RateLimit, Checksum: sum, Method: cfg.Method,
		Listener: l, Successor: cfg.Takeover,
		Examiner: cfg.Examiner, PingInterval: cfg.PingInterval, DeadAfter: cfg.Silence, Limits: cfg.Limits, Logger: cfg.Logger, Metrics: m,
	}
	if cfg.Debug {
		tc.Pauses = transfer.NewPauses()
	}
	tel, err := newTelemetry(cfg, &tc)
	if err != nil {
		return nil, nil, err
	}
	eng, err := transfer.New(tc)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start data plane: %w", err), tel.Close())
	}
	tel.Listening(eng.Listener())
	return eng, tel, nil
}

// newTelemetry starts measuring what the data plane will do.
func newTelemetry(cfg Config, tc *transfer.Config) (*telemetry.Telemetry, error) {
	if telemetry.Mode(cfg.Telemetry) == telemetry.Off {
		return nil, nil
	}
	tel, err := telemetry.New(telemetry.Config{Mode: telemetry.Mode(cfg.Telemetry), Posts: cfg.Posts, Logger: cfg.Logger})
	if err != nil {
		return nil, fmt.Errorf("start telemetry: %w; --telemetry auto goes on without", err)
	}
	tc.Observer, tc.Dial = tel, tel.Dial
	return tel, nil
}
