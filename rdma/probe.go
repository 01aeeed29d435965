package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

const (
	probeBytes    = 4096
	probePatience = 2 * time.Second
)

// probeWindows says why this rail's memory windows are no fence, nil if they are. It is found out once, by trying: a queue
// pair that is its own other end writes through a window, takes it back and must not get through any more.
func (x *lane) probeWindows() error {
	p := &x.rail.windows
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.probed {
		return p.why
	}
	switch {
	case !x.rail.attr.MemoryWindows():
		p.why = errors.New("the device has none of type 2")
	case x.rail.soft:
		p.why = canSettleSoft()
	}
	if p.why == nil {
		p.why = x.tryWindow()
	}
	// What a device answered by its limits may be other at the next lane: not conclusive.
	p.probed = p.why == nil || !errors.Is(p.why, unix.ENOMEM) && !errors.Is(p.why, unix.EAGAIN)
	return p.why
}

// prober is a queue pair that is connected to itself.
type prober struct {
	lane // for its transitions
	mem  []byte
	mr   *cgo.MR
	w    *cgo.Window
}

func (x *lane) tryWindow() (err error) {
	p := &prober{lane: lane{link: x.link, rail: x.rail, psn: randomPSN(), at: x.at}}
	defer func() { err = errors.Join(err, p.close()) }()
	r := x.rail
	if p.mem, err = unix.Mmap(-1, 0, probeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return fmt.Errorf("map memory: %w", err)
	}
	if p.mr, err = r.pd.Register(p.mem, cgo.LocalWrite|cgo.BindWindow); err != nil {
		return err
	}
	if p.w, err = r.pd.NewWindow(); err != nil {
		return err
	}
	if p.cq, err = r.dev.NewCQ(8, nil); err != nil {
		return err
	}
	if p.qp, err = r.pd.NewQP(p.cq, p.cq, cgo.QPCaps{SendWR: 4, RecvWR: 1, SendSGE: 1, RecvSGE: 1}); err != nil {
		return err
	}
	p.peer = hello{qpn: p.qp.Num, psn: p.psn, mtu: x.at.state.ActiveMTU, lid: x.at.state.LID, layer: x.at.state.LinkLayer, gid: x.at.gid.Addr}
	for _, transition := range []func() error{p.toInit, p.toRTR, p.toRTS} {
		if err := transition(); err != nil {
			return err
		}
	}
	return p.try()
}

func (p *prober) try() error {
	const half = probeBytes / 2
	at := addressOf(p.mem)
	write := cgo.WR{Local: at, Remote: at + half, Len: half, LKey: p.mr.LKey, ID: 2, Flags: cgo.Signaled}
	fill := func(v byte) { copy(p.mem[:half], bytes.Repeat([]byte{v}, half)) }
	for i := range byte(2) { // windows are used again
		if err := p.qp.PostBind(p.w, p.mr, at+half, half, cgo.RemoteWrite, 1); err != nil {
			return err
		}
		if wc, err := p.await(); err != nil || wc.Status != cgo.Success {
			return fmt.Errorf("bind a memory window: %w", errors.Join(err, statusErr(wc)))
		}
		write.RKey = p.w.RKey
		fill(1 + i)
		if wc, err := p.post(write); err != nil || wc.Status != cgo.Success || !bytes.Equal(p.mem[:half], p.mem[half:]) {
			return fmt.Errorf("write through a memory window: %w", errors.Join(err, statusErr(wc), errors.New("the bytes are not there")))
		}
		if wc, err := p.post(cgo.WR{RKey: p.w.RKey, ID: 3, Op: cgo.LocalInv, Flags: cgo.Signaled}); err != nil || wc.Status != cgo.Success {
			return fmt.Errorf("invalidate a memory window: %w", errors.Join(err, statusErr(wc)))
		}
	}
	const after = 9
	fill(after)
	wc, err := p.post(write)
	if err != nil {
		return fmt.Errorf("write through an invalidated memory window: %w", err)
	}
	if wc.Status == cgo.Success || bytes.IndexByte(p.mem[half:], after) >= 0 {
		return errors.New("a write went through a memory window after its invalidation")
	}
	return nil
}

func statusErr(wc cgo.WC) error {
	if wc.Status == cgo.Success {
		return nil
	}
	return wc.Status
}

func (p *prober) post(wr cgo.WR) (cgo.WC, error) {
	if n, errno := p.qp.PostSend([]cgo.WR{wr}); n != 1 {
		return cgo.WC{}, errno
	}
	return p.await()
}

// await takes the next completion.
func (p *prober) await() (cgo.WC, error) {
	var wcs [1]cgo.WC
	for deadline := time.Now().Add(probePatience); ; runtime.Gosched() {
		n, err := p.cq.Poll(wcs[:])
		if n == 1 || err != nil {
			return wcs[0], err
		}
		if time.Now().After(deadline) {
			return wcs[0], fmt.Errorf("nothing completed within %v", probePatience)
		}
	}
}

func (p *prober) close() error {
	var errs []error
	if p.w != nil {
		errs = append(errs, p.w.Close()) // before its queue pair
	}
	if p.qp != nil {
		errs = append(errs, p.qp.Close())
	}
	if p.cq != nil {
		errs = append(errs, p.cq.Close())
	}
	if p.mr != nil {
		errs = append(errs, p.mr.Close())
	}
	if p.mem != nil {
		errs = append(errs, unix.Munmap(p.mem))
	}
	return errors.Join(errs...)
}
