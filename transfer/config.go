package transfer

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/headrace/headrace/transfer/handshake"
)

// Config configures an Engine. NodeID, ClusterKey and Transports are needed; the rest has useful zero values.
type Config struct {
	NodeID     string // unique in the cluster, 1 to ticket.IDMax bytes
	Epoch      uint64 // one a life of the daemon; 0 draws one
	ClusterKey []byte // at least 16 bytes
	// Listen is the data plane's address, "host:port". Empty with a nil Listener: local copies only, and dialling out.
	Listen   string
	Listener net.Listener // in place of Listen; the Engine owns it
	// Successor makes an engine that takes over from another: it takes nothing before Succeed.
	Successor bool
	Advertise string // what peers are told to dial; the listener's address when empty
	Dial      func(ctx context.Context, addr string) (net.Conn, error)

	Transports []Transport // in order of preference; the Engine closes them
	Transport  string      // "" or "auto", else the name of the only one to use
	Lanes      int         // a channel; 0: as many as there are processors, 2 to 4
	Checksum   Checksum    // of the pieces this engine sends
	Method     string      // "" or "auto": direct or staged, as measured; else that one
	RateLimit  int64       // bytes a second this engine sends, 0: no limit. SetRate changes it

	PingInterval time.Duration // 500 ms
	DeadAfter    time.Duration // 2.5 s without an answer, counted in ping intervals of a process that runs
	DialTimeout  time.Duration // 3 s for dialling, handshake and lanes
	FenceGrace   time.Duration // 20 ms to agree, then force

	// Examiner answers a peer that asks what this host can do; nil: nobody may ask. The connection is closed when it returns.
	Examiner func(ctx context.Context, conn net.Conn) error

	Limits  Limits
	Logger  *slog.Logger
	Metrics Metrics
	// Observer measures lanes; nil: nobody does. The engine's owner closes it, after the engine.
	Observer Observer
	Pauses   *Pauses

	ticks func(every time.Duration) (ticks <-chan time.Time, stop func()) // of channels; tests give their own
}

// Limits bound everything that a client or a peer can make grow. Zero fields take the defaults said here.
type Limits struct {
	Clients          int           // 64 engines attached
	RegionsPerClient int           // 64
	LeasesPerClient  int           // 4096 living
	Leases           int           // 16384 living, all clients
	Channels         int           // 1024, dialled and accepted
	Handshakes       int           // 64 connections not yet authenticated
	Blocks           int           // 65536 block ids a lease
	PiecesPerLease   int           // 1<<22 pieces to count
	PushesPerLease   int           // 4096 pushes not yet landed
	UnitsPerPush     int           // 65536
	MetaBytes        int           // 64 KiB
	RecordBytes      int           // 1 MiB
	Tickets          int           // 65536 remembered nonces
	TicketLife       time.Duration // 1 h: tickets with a deadline further away are refused
	ControlQueue     int           // 8192 frames, and 64 MiB, waiting for one control connection
}

// Metrics hears what status counters cannot tell: durations. Methods must not block.
type Metrics interface {
	// LeaseEnded: side is "source" or "target"; seconds since it was opened.
	LeaseEnded(side string, state LeaseState, transport string, bytes uint64, d time.Duration)
	// Fenced: how long fencing a lease took; forced when a lane had to be aborted.
	Fenced(side string, d time.Duration, forced bool)
}

// Why two daemons could not agree to speak, and that it is for lack of a common protocol version.
var (
	ErrHandshake = handshake.ErrHandshake
	ErrVersion   = handshake.ErrVersion
)

// Errors that callers tell apart. Each is wrapped with the particulars.
var (
	ErrClosed        = errors.New("engine is closed")
	ErrClientClosed  = errors.New("client is closed")
	ErrAttached      = errors.New("an engine with this id is attached already")
	ErrUnknownLease  = errors.New("no such lease")
	ErrLeaseEnded    = errors.New("lease has ended")
	ErrUnknownRegion = errors.New("no such region")
	ErrNotPresented  = errors.New("ticket has not been presented")
	ErrTicketUsed    = errors.New("ticket was used already")
	ErrWrongTicket   = errors.New("ticket is made out to another")
	ErrRegion        = errors.New("refuse region")
	ErrLayout        = errors.New("refuse layout")
	ErrPlan          = errors.New("refuse copy plan")
	ErrLimit         = errors.New("limit reached")
	ErrInvalid       = errors.New("invalid request")
)
