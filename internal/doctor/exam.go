package doctor

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"time"

	"github.com/headrace/headrace/transfer"
)

// An examination is a conversation of requests and answers over an authenticated connection, one at a time, each a
// little-endian length of 4 bytes and so much JSON. It holds nothing that a daemon needs to go on.
const (
	examVersion = 1
	messageMax  = 1 << 20
	requestWait = 30 * time.Second // for the next request, and for an answer
)

// request is what the examining end asks.
type request struct {
	Op  string     `json:"op"`            // facts, clock, join, sum or leave
	End *endpoint  `json:"end,omitempty"` // of join: what the other end joins with
	Use *pairUsage `json:"use,omitempty"` // of join: what this end is to use
}

// answer has an error or what was asked for.
type answer struct {
	Error string    `json:"error,omitempty"`
	Facts *facts    `json:"facts,omitempty"`
	Nanos int64     `json:"nanos,omitempty"` // the clock
	End   *endpoint `json:"end,omitempty"`
	Sum   uint64    `json:"sum,omitempty"` // xxHash64 of the memory that was written to
}

// facts are what one host says of itself.
type facts struct {
	Version      int         `json:"version"`
	Host         string      `json:"host"`
	Build        string      `json:"build"`
	Low          uint16      `json:"protocol_low"`
	High         uint16      `json:"protocol_high"`
	Synchronised bool        `json:"clock_synchronised"`
	ClockFix     string      `json:"clock_command"`
	Interface    string      `json:"interface"` // of the connection
	MTU          int         `json:"interface_mtu"`
	Ports        []portFacts `json:"ports"`
	Lacks        string      `json:"lacks,omitempty"` // why there are no ports
}

// portFacts is an RDMA port.
type portFacts struct {
	Device    string     `json:"device"`
	Port      int        `json:"port"`
	Soft      bool       `json:"soft"`
	Layer     string     `json:"link_layer"`
	State     string     `json:"state"`
	Netdev    string     `json:"netdev"`
	NetdevMTU int        `json:"netdev_mtu"`
	MTU       uint32     `json:"mtu"`
	LID       uint32     `json:"lid"`
	GIDs      []gidFacts `json:"gids"`
}

type gidFacts struct {
	Index int    `json:"index"`
	Kind  string `json:"kind"`
	Text  string `json:"text"`
}

func (p *portFacts) String() string { return fmt.Sprintf("%s/%d", p.Device, p.Port) }

// writeMessage sends one message.
func writeMessage(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > messageMax {
		return fmt.Errorf("message of %d bytes, at most %d", len(b), messageMax)
	}
	_, err = w.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

// readMessage reads one message.
func readMessage(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > messageMax {
		return fmt.Errorf("message of %d bytes, at most %d", n, messageMax)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("read a message: %w", err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read a message: %w", err)
	}
	return nil
}

// Examiner answers examinations of this host.
type Examiner struct {
	Root  fs.FS
	Host  string // what this host is called
	Build string
	Now   func() time.Time // the clock; nil: the host's
}

func (x *Examiner) now() time.Time {
	if x.Now != nil {
		return x.Now()
	}
	return time.Now()
}

// Serve answers until the other end has heard enough. conn is authenticated, and ctx's end breaks it off.
func (x *Examiner) Serve(ctx context.Context, conn net.Conn) (err error) {
	var joined *end
	defer func() { err = errors.Join(err, joined.close()) }()
	for ctx.Err() == nil {
		conn.SetDeadline(time.Now().Add(requestWait))
		if ctx.Err() != nil { // it set a deadline that has passed
			break
		}
		var q request
		if err := readMessage(conn, &q); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		var a answer
		switch q.Op {
		case "facts":
			a.Facts = x.facts(conn)
		case "clock":
			a.Nanos = x.now().UnixNano()
		case "join":
			err := joined.close()
			joined = nil
			if err == nil {
				joined, err = join(&q)
			}
			if err != nil {
				a.Error = err.Error()
			} else {
				a.End = &joined.own
			}
		case "sum":
			a.Sum = joined.sum()
		case "leave":
			err := joined.close()
			joined = nil
			if err != nil {
				a.Error = err.Error()
			}
		default:
			a.Error = fmt.Sprintf("this build knows no %q", q.Op)
		}
		if err := writeMessage(conn, &a); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// join makes this end of what the request asks for.
func join(q *request) (*end, error) {
	if q.Use == nil || q.End == nil {
		return nil, errors.New("join what?")
	}
	e, err := openEnd(q.Use)
	if err != nil {
		return nil, err
	}
	if err := e.join(q.Use, q.End); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

// facts gathers what the other end compares with its own.
func (x *Examiner) facts(conn net.Conn) *facts {
	h := here(x.Root)
	f := &facts{Version: examVersion, Host: x.Host, Build: x.Build, ClockFix: h.syncCommand()}
	f.Low, f.High = transfer.Versions()
	f.Synchronised = h.checkClock().Answer == Yes
	f.Interface, f.MTU = interfaceOf(conn.LocalAddr())
	devices := h.devices()
	f.Ports = h.portFacts(devices)
	if len(f.Ports) == 0 {
		f.Lacks = "it has no RDMA port"
		for _, c := range h.checkVerbs(devices) {
			if c.Answer == Lacking {
				f.Lacks += ": " + c.Name + ": " + c.Detail
				break
			}
		}
	}
	return f
}

func (h *host) portFacts(devices []*device) (all []portFacts) {
	for _, d := range devices {
		for i := range d.ports {
			p := &d.ports[i]
			f := portFacts{Device: d.name, Port: p.number, Soft: d.soft, Layer: p.layer, State: p.state, Netdev: p.netdev}
			f.NetdevMTU, _ = h.number("sys/class/net/" + p.netdev + "/mtu")
			if d.libErr == nil && p.number <= len(d.lib.ports) {
				f.MTU, f.LID = d.lib.ports[p.number-1].ActiveMTU, d.lib.ports[p.number-1].LID
			}
			for _, g := range p.gids {
				f.GIDs = append(f.GIDs, gidFacts{g.index, g.kind, g.text})
			}
			all = append(all, f)
		}
	}
	return all
}

// interfaceOf finds the interface that has an address.
func interfaceOf(a net.Addr) (name string, mtu int) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return "", 0
	}
	all, err := net.Interfaces()
	if err != nil {
		return "", 0
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.Equal(tcp.IP) {
				return i.Name, i.MTU
			}
		}
	}
	return "", 0
}
