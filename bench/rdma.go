package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/rdma"
	"github.com/headrace/headrace/transfer"
)

// noRDMA says how to have a device.
const noRDMA = "bench transfer over rdma needs a device: %w; in an emulated machine with soft RoCE: make lab ARGS=\"-scenario bench\"; what posting costs needs none: --part posts"

// findRDMA measures what needs no device, and looks for one.
func (s *session) findRDMA() (there bool, err error) {
	if slices.Contains(s.o.Parts, partPosts) {
		if err := s.posts(); err != nil {
			return false, fmt.Errorf("bench transfer over rdma: %s: %w", partPosts, err)
		}
	}
	if !slices.ContainsFunc(s.o.Parts, func(part string) bool { return part != partPosts }) {
		return false, nil
	}
	if s.ports, err = usedPorts(); err != nil {
		err = fmt.Errorf(noRDMA, err)
		if s.o.Transport == "all" {
			s.note("%v", err)
			return false, nil
		}
		return false, err
	}
	if s.perf, err = newPerftest(s.ports[0]); err != nil {
		s.note("%v", err)
	}
	return true, nil
}

// usedPorts lists the ports that lanes would use, or says why there are none.
func usedPorts() (ports []transfer.PortStatus, err error) {
	t := rdma.New(rdma.Config{})
	defer func() { err = errors.Join(err, t.Close()) }()
	if err := t.Probe(); err != nil {
		return nil, err
	}
	for _, p := range t.(transfer.Porter).Ports() {
		if p.Used {
			ports = append(ports, p)
		}
	}
	return ports, nil
}

func portName(p *transfer.PortStatus) string { return fmt.Sprintf("port %d of %s", p.Port, p.Device) }

// runSeconds is how long a run over RDMA is to take where the number of bytes was not asked for: devices differ ten
// thousandfold.
const runSeconds = 0.7

// runBytes is how many bytes a run moves.
func (s *session) runBytes(ctx context.Context, r *rig) (int64, error) {
	if s.o.fixedBytes || !r.whole {
		return s.o.Bytes, nil
	}
	m, err := r.move(ctx, 0)
	if err != nil {
		return 0, err
	}
	const most = 1 << 36
	passes := min(float64(m.Bytes)/m.Seconds*runSeconds, most) / float64(s.o.Region)
	return max(int64(passes+0.5), 1) * s.o.Region, nil
}

// carriers lists the rails of the rig's channel, as the sending end sees them.
func (r *rig) carriers(ctx context.Context) ([]transfer.RailStatus, error) {
	st, err := r.pairs[0].p.Status(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range st.Channels {
		if c.Transport == "rdma" {
			return c.Rails, nil
		}
	}
	return nil, errors.New("the daemons have no channel over RDMA")
}

// channelLanes says how many lanes the rig's channel has over RDMA.
func (r *rig) channelLanes(ctx context.Context) int {
	rails, err := r.carriers(ctx)
	lanes := 0
	for _, c := range rails {
		if c.Transport == "rdma" {
			lanes += c.LanesUp
		}
	}
	if err != nil || lanes == 0 {
		return 1
	}
	return lanes
}

// shares says what each rail has carried, and fails when something else has carried a part.
func (r *rig) shares(ctx context.Context) (list []RailShare, err error) {
	rails, err := r.carriers(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range rails {
		if c.Transport != "rdma" && c.BytesSent > 0 {
			return nil, fmt.Errorf("%d bytes went over %s in place of RDMA: %s", c.BytesSent, c.Name, c.Why)
		}
		list = append(list, RailShare{Name: c.Name, Share: c.Share})
	}
	return list, nil
}

// How often posts are measured.
const (
	postRounds = 15
	postTimes  = 300
)

// posts measures what posting takes beside plain C loops.
func (s *session) posts() error {
	for _, blocks := range []int{1, 64, 1000} {
		var own, loop, chain, ratio []float64
		for range postRounds {
			c, err := rdma.MeasurePost(blocks, postTimes)
			if errors.Is(err, cgo.ErrNotSupported) {
				s.note("posts: not measured, %v", err)
				return nil
			}
			if err != nil {
				return err
			}
			own, loop, chain = append(own, c.Ours/1e3), append(loop, c.Loop/1e3), append(chain, c.Chain/1e3)
			ratio = append(ratio, c.Ours/min(c.Loop, c.Chain))
		}
		s.r.Posts = append(s.r.Posts, PostRow{Blocks: blocks, Ours: median(own), Loop: median(loop), Chain: median(chain), Ratio: median(ratio),
			RatioMin: slices.Min(ratio), RatioMax: slices.Max(ratio), PerSec: float64(blocks) / median(own) * 1e6})
	}
	return nil
}

// railsMost bounds how many ports take part.
const railsMost = 4

// rails measures channels over one port, two, and so on.
func (s *session) rails(ctx context.Context, t string) error {
	if len(s.ports) < 2 {
		s.note("rails: not measured, there is one port (%s)", portName(&s.ports[0]))
		return nil
	}
	for n := 1; n <= min(len(s.ports), railsMost); n++ {
		o := s.rigOptions(t, s.o.Lanes, 1)
		o.devices = devicesOf(s.ports[:n])
		r, err := newRig(ctx, o)
		if err != nil {
			return err
		}
		row := Row{Part: partRails, Transport: t, BlockBytes: 64 * kib, Lanes: o.lanes, Engines: 1, Rails: n}
		if err := errors.Join(s.rail(ctx, r, row), r.close()); err != nil {
			return err
		}
	}
	return nil
}

// devicesOf names ports as a daemon's configuration does.
func devicesOf(ports []transfer.PortStatus) (names []string) {
	for _, p := range ports {
		names = append(names, fmt.Sprintf("%s:%d", p.Device, p.Port))
	}
	return names
}

func (s *session) rail(ctx context.Context, r *rig, row Row) error {
	if err := s.ready(ctx, r, &row); err != nil {
		return err
	}
	bytes, err := s.runBytes(ctx, r)
	if err != nil {
		return err
	}
	list := []contestant{{name: ours, run: func(ctx context.Context) (m Measure, err error) {
		if m, err = r.move(ctx, bytes); err == nil {
			row.RailShares, err = r.shares(ctx)
		}
		return m, err
	}}}
	return s.race(ctx, r, &row, append(list, s.beside(ctx, r, row.Transport, row.BlockBytes, bytes)...))
}

// spinFor is how long daemons poll that are said to spin.
const spinFor = 100 * time.Microsecond

// completions measures daemons that park at once beside some that poll for a while first: rate, CPU time and latency.
func (s *session) completions(ctx context.Context, t string) error {
	o := s.rigOptions(t, s.o.Lanes, 1)
	o.spin = 0
	parked, err := newRig(ctx, o)
	if err != nil {
		return err
	}
	o.spin = spinFor
	spinning, err := newRig(ctx, o)
	if err == nil {
		err = errors.Join(s.spinning(ctx, t, parked, spinning), spinning.close())
	}
	return errors.Join(err, parked.close())
}

func (s *session) spinning(ctx context.Context, t string, parked, spinning *rig) error {
	for _, block := range s.p.laneBlocks {
		row := Row{Part: partCompletions, Transport: t, BlockBytes: block, Lanes: s.o.Lanes, Engines: 1}
		if err := errors.Join(s.ready(ctx, spinning, &Row{BlockBytes: block}), s.ready(ctx, parked, &row)); err != nil {
			return err
		}
		bytes, err := s.runBytes(ctx, parked)
		if err != nil {
			return err
		}
		list := []contestant{
			{name: ours, run: func(ctx context.Context) (Measure, error) { return parked.move(ctx, bytes) }},
			{name: oursSpinning, what: fmt.Sprintf("the same, daemons that poll for completions for %v before they park", spinFor), run: func(ctx context.Context) (Measure, error) { return spinning.move(ctx, bytes) }},
		}
		if err := s.race(ctx, parked, &row, list); err != nil {
			return err
		}
	}
	return nil
}
