package transfer

import "errors"

// Engine is the data plane of one node daemon.
type Engine struct{}

// Client is one attached inference engine.
type Client struct{}

var errSoon = errors.New("not built yet")

// New starts an engine: it listens, if it was told to, and dials peers when tickets are presented to them.
func New(cfg Config) (*Engine, error) { return nil, errSoon }

// NodeID, Epoch and DataAddr identify the engine to its peers. DataAddr is "" when it does not listen.
func (e *Engine) NodeID() string   { return "" }
func (e *Engine) Epoch() uint64    { return 0 }
func (e *Engine) DataAddr() string { return "" }

// SetRate changes the rate limit, bytes a second; 0 takes it away.
func (e *Engine) SetRate(bytesPerSecond int64) {}

// Rate is the rate limit in force.
func (e *Engine) Rate() int64 { return 0 }

// Pauses are the pause points of the configuration, nil if it had none.
func (e *Engine) Pauses() *Pauses { return nil }

// Status is a snapshot.
func (e *Engine) Status() Status { return Status{} }

// Close fences all leases, closes clients, channels, the listener and the transports, and waits for every goroutine.
func (e *Engine) Close() error { return errSoon }

// Attach adds an inference engine. Events are delivered by calling ev, one at a time and in order; ev must neither block
// nor call into the Engine or the Client. A second Attach with the same id is refused while the first one lives.
func (e *Engine) Attach(engineID string, ev func(Event)) (*Client, error) { return nil, errSoon }

// AddRegion takes over fd, also when it fails. The descriptor must be a memfd sealed against shrinking (F_SEAL_SHRINK),
// at least size bytes long, and l must fit in size bytes.
func (c *Client) AddRegion(fd int, size uint64, l Layout, flags RegionFlags) (RegionID, error) {
	return 0, errSoon
}

// RemoveRegion revokes the region's leases, waits for their fences and unmaps it.
func (c *Client) RemoveRegion(id RegionID) error { return errSoon }

// Present (P) presents a ticket to D's daemon. EventBound, EventRefused or EventEnded answers.
func (c *Client) Present(r PresentReq) (LeaseID, error) { return 0, errSoon }

// Push (P) sends units whose KV is complete. It may be called before EventBound. EventPushed with seq answers when all of
// them landed. The blocks' bytes must not change until the lease ended.
func (c *Client) Push(id LeaseID, units []Unit, seq uint64) error { return errSoon }

// Handoff (P) gives the record that D gets when the lease settles. It is sent when every wanted unit has been.
func (c *Client) Handoff(id LeaseID, record []byte) error { return errSoon }

// Bind (D) binds a presented ticket to blocks. The lease is that of EventPresented.
func (c *Client) Bind(r BindReq) (LeaseID, error) { return 0, errSoon }

// Refuse (D) answers a presented ticket with no. A ticket that has not been presented yet will be refused when it is.
func (c *Client) Refuse(ticket []byte, reason string) error { return errSoon }

// Revoke ends a lease. When it returns, no byte lands in its blocks and none is read from them any more; the peer is told.
// EventEnded was sent by then. A lease that has ended already gives ErrLeaseEnded or ErrUnknownLease: it is fenced too.
func (c *Client) Revoke(id LeaseID, reason string) error { return errSoon }

// RevokeTicket is Revoke for who knows the ticket only. A ticket that has not been presented yet will be refused when it is.
func (c *Client) RevokeTicket(nonce [16]byte, reason string) error { return errSoon }

// Close revokes all leases, drops all regions, and returns when everything is fenced and unmapped.
func (c *Client) Close() error { return errSoon }
