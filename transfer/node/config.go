package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/ring"
	"github.com/headrace/headrace/transfer/telemetry"
)

// Config configures a daemon. NodeID, Socket and ClusterKey are needed; the rest has useful zero values.
type Config struct {
	NodeID     string
	Epoch      uint64 // one a life of the daemon; 0 draws one
	Socket     string // path of the unix socket; its folder is made, 0700, when missing
	Listen     string // the data plane's "host:port"; empty: local copies only
	Advertise  string // what peers are told to dial, when Listen is not it
	ClusterKey []byte
	Transport  string                    // auto, tcp, shm or rdma
	Transports []transfer.Transport      // in place of the built-in ones, for tests
	RDMA       func() transfer.Transport // made where Transport is auto or rdma; nil: this program has none
	Lanes      int
	Method     string          // auto, direct or staged
	Congestion string          // of TCP lanes: "" the host's own but cubic on loopback, "host", or a name
	RateLimit  int64           // bytes a second, 0: none
	Telemetry  string          // auto, ebpf, kernel or off; empty: off
	Posts      telemetry.Posts // of this program's RDMA; zero: it has none
	Checksum   string          // of pieces sent: off, sampled (the default), always or 1/N
	Admin      string          // "127.0.0.1:0"; empty: no HTTP
	Debug      bool            // pause points and rate over HTTP
	AllowUIDs  []uint32
	Examiner   func(ctx context.Context, conn net.Conn) error // answers `headrace doctor --peer`; nil: nobody
	Limits     transfer.Limits
	Logger     *slog.Logger
	OnReady    func(Ready) // called once, when everything listens
	// Peers brings the daemons that this one's engines may have to send to, data addresses by node id: channels to them are
	// set up before a request needs them. Each map takes the place of the one before.
	Peers <-chan map[string]string

	// Takeover asks the daemon that serves Socket, if there is one, for its place. It drains then: its engines come here,
	// its leases end there, at most for its own DrainTimeout (60 s).
	Takeover     bool
	DrainTimeout time.Duration
	OnHandedOver func() // called once, when a successor has this daemon's place
	Build        string // what logs and status call this version of the program

	// Spin is how long a daemon goes on looking at an engine's ring, where work comes that often, before it sleeps:
	// 100 us. Negative: never.
	Spin time.Duration

	MaxInflight   int           // requests of one engine being worked on, 1024
	EventFrames   int           // frames waiting for one engine, 8192
	EventBytes    int           // bytes waiting for one engine, 32 MiB
	HelloTimeout  time.Duration // for HELLO after connecting, 2 s
	AttachTimeout time.Duration // how long HELLO waits for an earlier connection of the same id to be fenced, 5 s
	FlushTimeout  time.Duration // for last words to an engine, 500 ms
	PingInterval  time.Duration // what engines are told: ping so often, 500 ms
	Silence       time.Duration // and give the daemon up after so much silence, 2.5 s
}

// Ready says where a daemon can be reached.
type Ready struct {
	NodeID   string `json:"node_id"`
	Epoch    uint64 `json:"epoch"`
	PID      int    `json:"pid"`
	Socket   string `json:"socket"`
	DataAddr string `json:"data_addr"`
	Admin    string `json:"admin"`
}

// Validate says what cannot be of a configuration, before anything is opened.
func (c Config) Validate() error {
	_, err := c.withDefaults()
	return err
}

func (c Config) withDefaults() (Config, error) {
	if c.NodeID == "" {
		return c, errors.New("configure node daemon: the node id is empty")
	}
	if c.Socket == "" {
		return c, errors.New("configure node daemon: no path for the unix socket")
	}
	if c.Checksum == "" {
		c.Checksum = "sampled"
	}
	if _, err := transfer.ParseChecksum(c.Checksum); err != nil {
		return c, fmt.Errorf("configure node daemon: %w", err)
	}
	if err := transfer.CheckWays(c.Method, c.Lanes); err != nil {
		return c, fmt.Errorf("configure node daemon: %w", err)
	}
	if len(c.Transports) == 0 && !slices.Contains([]string{"", "auto", "tcp", "shm", "rdma"}, c.Transport) {
		return c, fmt.Errorf("configure node daemon: transport %q: use auto, tcp, shm or rdma", c.Transport)
	}
	if c.Telemetry == "" {
		c.Telemetry = string(telemetry.Off)
	}
	if _, err := telemetry.ParseMode(c.Telemetry); err != nil {
		return c, fmt.Errorf("configure node daemon: %w", err)
	}
	if c.Debug && c.Admin != "" {
		host, _, err := net.SplitHostPort(c.Admin)
		if err != nil {
			return c, fmt.Errorf("configure node daemon: admin address %q: %w", c.Admin, err)
		}
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return c, fmt.Errorf("configure node daemon: debug mode needs a loopback admin address, not %q", c.Admin)
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	orInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	orTime := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	orInt(&c.MaxInflight, 1024)
	orInt(&c.EventFrames, 8192)
	orInt(&c.EventBytes, 32<<20)
	orTime(&c.Spin, ring.SpinDefault)
	orTime(&c.HelloTimeout, 2*time.Second)
	orTime(&c.AttachTimeout, 5*time.Second)
	orTime(&c.FlushTimeout, 500*time.Millisecond)
	orTime(&c.PingInterval, 500*time.Millisecond)
	orTime(&c.Silence, 2500*time.Millisecond)
	orTime(&c.DrainTimeout, time.Minute)
	return c, nil
}
