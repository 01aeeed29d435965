//go:build amd64 || arm64

package telemetry

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
)

// posts times work requests from posting to completion, by uprobes on this program's own functions.
type posts struct {
	objs  postsObjects
	multi bool // by links of the newer kind, which CAP_BPF and CAP_PERFMON allow; the older one takes CAP_SYS_ADMIN
	links []link.Link

	mu     sync.Mutex
	lanes  map[uint32]int // by queue pair: those of two devices may have the same number
	ended  Times          // of queue pairs that are gone
	closed bool
}

func newPosts(at Posts) (_ *posts, err error) {
	if at.Post == 0 || at.Poll == 0 {
		return nil, fmt.Errorf("%w: this program posts nothing", errNothing)
	}
	p, err := loadProbes()
	if err != nil {
		return nil, err
	}
	if err := p.attach(at.Post, p.objs.PostSampled); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	if err := p.attach(at.Poll, p.objs.PollSampled); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// loadProbes loads the programs for the kind of link that there is.
func loadProbes() (*posts, error) {
	p := &posts{lanes: make(map[uint32]int), multi: features.HaveBPFLinkUprobeMulti() == nil} // Linux 6.6
	spec, err := loadPosts()
	if err != nil {
		return nil, err
	}
	if p.multi {
		for _, prog := range spec.Programs {
			prog.AttachType = ebpf.AttachTraceUprobeMulti
		}
	}
	if err := spec.LoadAndAssign(&p.objs, nil); err != nil {
		return nil, fmt.Errorf("load programs: %w", err)
	}
	return p, nil
}

// attach probes the function at an address of this process: of this process alone, whoever else runs the same program.
func (p *posts) attach(addr uintptr, prog *ebpf.Program) error {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer maps.Close()
	offset, err := fileOffset(maps, uint64(addr))
	if err != nil {
		return err
	}
	exe, err := link.OpenExecutable("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("open this program: %w", err)
	}
	// By address: programs are stripped of their symbols.
	var l link.Link
	if p.multi {
		l, err = exe.UprobeMulti(nil, prog, &link.UprobeMultiOptions{Addresses: []uint64{offset}, PID: uint32(os.Getpid())})
	} else {
		l, err = exe.Uprobe("", prog, &link.UprobeOptions{Address: offset, PID: os.Getpid()})
	}
	if err != nil {
		return fmt.Errorf("attach uprobe: %w", err)
	}
	p.links = append(p.links, l)
	return nil
}

// fileOffset finds an address of this process in the file that it was mapped from.
func fileOffset(maps io.Reader, addr uint64) (uint64, error) {
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		var from, to, offset uint64
		var perms string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s %x", &from, &to, &perms, &offset); err != nil {
			return 0, fmt.Errorf("parse a mapping %q: %w", lines.Text(), err)
		}
		if addr >= from && addr < to {
			if !strings.Contains(perms, "x") {
				break
			}
			return addr - from + offset, nil
		}
	}
	return 0, fmt.Errorf("address %#x is no function of this program: %w", addr, errors.Join(lines.Err(), os.ErrNotExist))
}

// Close detaches the programs.
func (p *posts) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	var errs []error
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	return errors.Join(append(errs, p.objs.Close())...)
}

// watch begins timing a queue pair's posts.
func (p *posts) watch(qpn uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.objs.Queues.Update(qpn, postsTimes{}, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("enter queue pair %d: %w", qpn, err)
	}
	p.lanes[qpn]++
	return nil
}

// forget keeps a queue pair's times among those of the past.
func (p *posts) forget(qpn uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lanes[qpn]--; p.lanes[qpn] > 0 {
		return
	}
	delete(p.lanes, qpn)
	var v postsTimes
	if p.objs.Queues.LookupAndDelete(qpn, &v) == nil {
		p.ended.add(&v)
	}
}

// times are those of all queue pairs.
func (p *posts) times() (Times, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := p.ended
	if p.closed {
		return sum, nil
	}
	var k uint32
	var v postsTimes
	all := p.objs.Queues.Iterate()
	for all.Next(&k, &v) {
		sum.add(&v)
	}
	return sum, all.Err()
}

func (t *Times) add(v *postsTimes) {
	for i, n := range v.Slots {
		t.Slots[i] += n
	}
	t.SumNS += v.SumNs
	t.Count += v.Count
}

// probePosts times nothing: it loads the programs and probes a function of this program that is not called.
func probePosts() error {
	p, err := loadProbes()
	if err != nil {
		return err
	}
	return errors.Join(p.attach(probedAddr(), p.objs.PollSampled), p.Close())
}
