package node

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
)

// handle works one request off, on the reader's goroutine: requests of one engine take effect in the order sent.
func (c *conn) handle(f *wire.Frame) {
	m, e := c.check(f)
	if e != nil {
		c.send(f.Request, e)
		return
	}
	quiet := f.Flags&wire.FlagQuiet != 0
	answer := func(value uint64, err error) {
		switch {
		case err != nil:
			c.send(f.Request, refusal(err))
		case !quiet:
			c.send(f.Request, wire.OK{Value: value})
		}
	}
	switch m := m.(type) {
	case wire.Ping:
		c.send(f.Request, wire.Pong(m))
	case wire.RegisterRegion:
		c.register(f, m.Layout, func(fd int, l transfer.Layout) (transfer.RegionID, error) {
			return c.client.AddRegion(fd, m.Size, l, transfer.RegionFlags(m.Flags))
		})
	case wire.RegisterDMABuf:
		c.register(f, m.Layout, func(fd int, l transfer.Layout) (transfer.RegionID, error) {
			buf := transfer.DMABuf{FD: fd, Offset: m.Offset, Address: m.Address, Device: strings.ToLower(m.Device)}
			return c.client.AddDMABuf(buf, m.Size, l, transfer.RegionFlags(m.Flags))
		})
	case wire.Present:
		id, err := c.client.Present(transfer.PresentReq{Ticket: m.Ticket, Peer: m.Peer, Regions: regions(m.Regions), Tokens: m.Tokens, Blocks: m.Blocks, Meta: m.Meta})
		answer(uint64(id), err)
	case wire.Extend:
		answer(0, c.client.Extend(transfer.LeaseID(m.Lease), m.Blocks))
	case wire.Join:
		answer(0, c.join(m.EngineID))
	case wire.Describe:
		answer(0, c.describe(m.JSON))
	case wire.SetupRing:
		fds := f.FDs
		f.FDs = nil // it takes them over, also when it fails
		answer(0, c.setupRing(fds, m))
	case wire.Push:
		c.subs.message.Add(1)
		answer(0, c.client.Push(transfer.LeaseID(m.Lease), units(m.Units), m.Seq))
	case wire.Handoff:
		answer(0, c.client.Handoff(transfer.LeaseID(m.Lease), m.Record))
	case wire.Bind:
		id, err := c.client.Bind(transfer.BindReq{Ticket: m.Ticket, Regions: regions(m.Regions), FirstToken: m.FirstToken, Blocks: m.Blocks})
		answer(uint64(id), err)
	case wire.Refuse:
		answer(0, c.client.Refuse(m.Ticket, m.Reason))
	case wire.Revoke:
		c.later(f.Request, func() error {
			if m.Lease != 0 {
				return c.client.Revoke(transfer.LeaseID(m.Lease), m.Reason)
			}
			return c.client.RevokeTicket(m.Nonce, m.Reason)
		})
	case wire.RemoveRegion:
		c.later(f.Request, func() error { return c.client.RemoveRegion(transfer.RegionID(m.Region)) })
	case wire.Status:
		c.status(f.Request)
	default:
		c.send(f.Request, wire.Errorf(wire.CodeState, "%s may be sent once, and first", f.Type))
	}
}

// check parses a request and holds what is the same for all.
func (c *conn) check(f *wire.Frame) (wire.Message, *wire.Error) {
	if !f.Type.IsRequest() {
		return nil, wire.Errorf(wire.CodeUnknownType, "%s is not a request of this protocol", f.Type)
	}
	want := 0
	switch f.Type {
	case wire.TypeRegisterRegion, wire.TypeRegisterDMABuf:
		want = 1
	case wire.TypeSetupRing:
		want = wire.RingFDs
	}
	got := len(f.FDs)
	if f.FD >= 0 {
		got = 1
	}
	switch {
	case f.FDFault != "":
		return nil, wire.Errorf(wire.CodeDescriptor, "%s: %s", f.Type, f.FDFault)
	case got != want:
		return nil, wire.Errorf(wire.CodeDescriptor, "%d descriptors came with %s, want %d: send them by SCM_RIGHTS at the frame's first byte", got, f.Type, want)
	case f.Version != c.version:
		return nil, wire.Errorf(wire.CodeVersion, "%s of version %d, agreed was %d", f.Type, f.Version, c.version)
	case f.Request == 0:
		return nil, wire.Errorf(wire.CodeMalformed, "%s without a request id", f.Type)
	case f.Flags&^wire.FlagQuiet != 0 || f.Flags != 0 && f.Type != wire.TypePush:
		return nil, wire.Errorf(wire.CodeMalformed, "%s with flags %#x", f.Type, f.Flags)
	}
	if of := c.client.MemberOf(); of != "" && !slices.Contains(membersRequests, f.Type) {
		return nil, wire.Errorf(wire.CodeState, "%s is engine %q's own: %q is a member of it, which lends memory and pushes", f.Type, of, c.id)
	}
	m, err := wire.Parse(f.Type, f.Payload)
	if err != nil {
		return nil, refusal(err)
	}
	return m, nil
}

// membersRequests are what a member of an engine may ask for.
var membersRequests = []wire.Type{
	wire.TypePing, wire.TypeStatus, wire.TypeDescribe, wire.TypeRegisterRegion, wire.TypeRegisterDMABuf, wire.TypeRemoveRegion, wire.TypeSetupRing,
	wire.TypePush, wire.TypeRevoke, wire.TypeJoin,
}

// join makes the connection that of a member of an engine.
func (c *conn) join(engine string) error {
	before := c.member.Swap(&engine) // first: an engine of another user that attaches just now is to see it
	err := c.client.Join(engine)
	if err != nil {
		c.member.Store(before)
	}
	return err
}

// describe keeps what an engine says of itself, for the status.
func (c *conn) describe(doc []byte) error {
	if trimmed := bytes.TrimSpace(doc); !json.Valid(doc) || !utf8.Valid(doc) || trimmed[0] != '{' {
		return wire.Errorf(wire.CodeInvalid, "a description is one JSON object in UTF-8")
	}
	about := json.RawMessage(doc)
	c.about.Store(&about)
	return nil
}

// register lends memory. It is answered aside: pinning hundreds of GiB takes longer than an engine waits for a PONG.
func (c *conn) register(f *wire.Frame, layout []byte, add func(fd int, l transfer.Layout) (transfer.RegionID, error)) {
	l, err := transfer.UnmarshalLayout(layout) // now: the payload is the reader's
	if err != nil {
		c.send(f.Request, refusal(err))
		return
	}
	fd := f.FD
	if c.aside(f.Request, func() (uint64, error) {
		id, err := add(fd, l)
		return uint64(id), err
	}) {
		f.FD = -1 // add takes it over, also when it fails
	}
}

// later answers a request that waits for a fence.
func (c *conn) later(request uint64, f func() error) {
	c.aside(request, func() (uint64, error) { return 0, f() })
}

// aside answers a request that takes its time in a goroutine, so that the engine's other requests are not held up. It says
// whether it does: else the request is refused.
func (c *conn) aside(request uint64, f func() (uint64, error)) bool {
	select {
	case c.slots <- struct{}{}:
	default:
		c.send(request, wire.Errorf(wire.CodeBusy, "%d requests wait for their fence, or for memory to be registered, already", cap(c.slots)))
		return false
	}
	c.waiting.Add(1)
	go func() {
		defer c.waiting.Done()
		value, err := f()
		<-c.slots
		if err != nil {
			c.send(request, refusal(err))
			return
		}
		c.send(request, wire.OK{Value: value})
	}()
	return true
}

func (c *conn) status(request uint64) {
	doc, err := json.Marshal(c.s.status())
	if err != nil {
		c.send(request, refusal(err))
		return
	}
	c.send(request, wire.StatusOK{JSON: doc})
}

func regions(in []uint64) []transfer.RegionID {
	out := make([]transfer.RegionID, len(in))
	for i, id := range in {
		out[i] = transfer.RegionID(id)
	}
	return out
}

func units(in []wire.Unit) []transfer.Unit {
	out := make([]transfer.Unit, len(in))
	for i, u := range in {
		out[i] = transfer.Unit(u)
	}
	return out
}
