package doctor

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
	"unsafe"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
)

// endpoint is what one end of a queue pair must know of the other.
type endpoint struct {
	QPN  uint32 `json:"qpn"`
	PSN  uint32 `json:"psn"`
	LID  uint32 `json:"lid"`
	GID  string `json:"gid"` // as the kernel writes it
	Key  uint32 `json:"key"`
	Addr uint64 `json:"addr"`
}

// pairUsage is what an end makes its queue pair of.
type pairUsage struct {
	Device string `json:"device"`
	Port   int    `json:"port"`
	GID    int    `json:"gid_index"`
	Text   string `json:"gid"`
	MTU    uint32 `json:"mtu"`
	Bytes  int    `json:"bytes"`
}

// The sizes of an examination's writes.
const (
	bytesMax   = 16 << 20
	chunkBytes = 256 << 10
	sendQueue  = bytesMax/chunkBytes + 1
)

// What a queue pair waits: 4.096 us * 2^16 = 268 ms, three times. A way that loses more is none.
const (
	ackTimeout = 16
	ackRetries = 3
	rnrTimer   = 12
	hopLimit   = 64
)

// end is one end of a queue pair that examinations write over, with the memory of its own.
type end struct {
	dev *cgo.Device
	pd  *cgo.PD
	cq  *cgo.CQ
	qp  *cgo.QP
	mr  *cgo.MR
	mem []byte
	own endpoint
}

func openEnd(u *pairUsage) (_ *end, err error) {
	if u.Bytes <= 0 || u.Bytes > bytesMax {
		return nil, fmt.Errorf("examine with %d bytes: at most %d", u.Bytes, bytesMax)
	}
	e := &end{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.dev, err = cgo.Open(u.Device); err != nil {
		return nil, err
	}
	attr, err := e.dev.Port(u.Port)
	if err != nil {
		return nil, err
	}
	if e.mem, err = unix.Mmap(-1, 0, u.Bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", u.Bytes, err)
	}
	if e.pd, err = e.dev.NewPD(); err != nil {
		return nil, err
	}
	if e.mr, err = e.pd.Register(e.mem, cgo.LocalWrite|cgo.RemoteWrite); err != nil {
		return nil, err
	}
	if e.cq, err = e.dev.NewCQ(sendQueue+1, nil); err != nil {
		return nil, err
	}
	if e.qp, err = e.pd.NewQP(e.cq, e.cq, cgo.QPCaps{SendWR: sendQueue, RecvWR: 1, SendSGE: 1, RecvSGE: 1}); err != nil {
		return nil, err
	}
	e.own = endpoint{QPN: e.qp.Num, PSN: rand.Uint32() & 0xffffff, LID: attr.LID, GID: u.Text, Key: e.mr.RKey, Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(e.mem))))}
	return e, nil
}

// join connects the queue pair with the other end's.
func (e *end) join(u *pairUsage, far *endpoint) error {
	if err := e.qp.To(cgo.QPInit, cgo.QPAttr{Port: uint32(u.Port), Access: cgo.LocalWrite | cgo.RemoteWrite}); err != nil {
		return err
	}
	a := cgo.QPAttr{
		Port: uint32(u.Port), PathMTU: u.MTU, DestQPN: far.QPN, RQPSN: far.PSN, MaxReadsServed: 1, MinRNRTimer: rnrTimer, DLID: far.LID,
	}
	if far.LID == 0 {
		to, err := gid{text: far.GID}.address()
		if err != nil {
			return fmt.Errorf("the other end's address: %w", err)
		}
		a.IsGlobal, a.DGID, a.SGIDIndex, a.HopLimit = 1, to.As16(), uint32(u.GID), hopLimit
	}
	if err := e.qp.To(cgo.QPRTR, a); err != nil {
		return err
	}
	return e.qp.To(cgo.QPRTS, cgo.QPAttr{
		Timeout: ackTimeout, RetryCount: ackRetries, RNRRetry: ackRetries, SQPSN: e.own.PSN, MaxReads: 1,
	})
}

// write fills this end's memory with noise and writes all of it to the other end's.
func (e *end) write(far *endpoint, patience time.Duration) (time.Duration, error) {
	noise := rand.NewChaCha8([32]byte{byte(rand.Uint32())})
	noise.Read(e.mem) //nolint:errcheck // it never fails
	var wrs []cgo.WR
	for at := 0; at < len(e.mem); at += chunkBytes {
		n := min(chunkBytes, len(e.mem)-at)
		wrs = append(wrs, cgo.WR{ID: uint64(at), Local: e.own.Addr + uint64(at), LKey: e.mr.LKey, Remote: far.Addr + uint64(at), RKey: far.Key, Len: uint32(n), Op: cgo.Write, Flags: cgo.Signaled})
	}
	return e.post(wrs, patience)
}

// trips writes 8 bytes so many times, one after another, and gives the median time: there and back.
func (e *end) trips(far *endpoint, times int, patience time.Duration) (time.Duration, error) {
	var all []time.Duration
	for range times {
		d, err := e.post([]cgo.WR{{Local: e.own.Addr, LKey: e.mr.LKey, Remote: far.Addr, RKey: far.Key, Len: 8, Op: cgo.Write, Flags: cgo.Signaled}}, patience)
		if err != nil {
			return 0, err
		}
		all = append(all, d)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// post posts requests and waits until all are completed.
func (e *end) post(wrs []cgo.WR, patience time.Duration) (time.Duration, error) {
	began := time.Now()
	if n, errno := e.qp.PostSend(wrs); n != len(wrs) {
		return 0, fmt.Errorf("post a write: %w", errno)
	}
	wcs := make([]cgo.WC, 16)
	for left := len(wrs); left > 0; {
		n, err := e.cq.Poll(wcs)
		if err != nil {
			return 0, err
		}
		for i := range wcs[:n] {
			if wcs[i].Status != cgo.Success {
				return 0, wcs[i].Status
			}
		}
		if left -= n; n == 0 {
			if time.Since(began) > patience {
				return 0, fmt.Errorf("nothing was acknowledged within %v", patience)
			}
			time.Sleep(10 * time.Microsecond)
		}
	}
	return time.Since(began), nil
}

// sum is of the memory; 0 where there is none.
func (e *end) sum() uint64 {
	if e == nil {
		return 0
	}
	return xxhash.Sum64(e.mem)
}

// close frees what there is, in reverse order.
func (e *end) close() error {
	if e == nil {
		return nil
	}
	var errs []error
	if e.qp != nil {
		errs = append(errs, e.qp.Close())
	}
	if e.cq != nil {
		errs = append(errs, e.cq.Close())
	}
	if e.mr != nil {
		errs = append(errs, e.mr.Close())
	}
	if e.pd != nil {
		errs = append(errs, e.pd.Close())
	}
	if e.mem != nil {
		errs = append(errs, unix.Munmap(e.mem))
		e.mem = nil
	}
	if e.dev != nil {
		errs = append(errs, e.dev.Close())
	}
	return errors.Join(errs...)
}
