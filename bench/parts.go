package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// submission says how an engine's requests have reached its daemon: by ring or by message.
func submission(ctx context.Context, p *pair) (string, error) {
	st, err := p.p.Status(ctx)
	if err != nil {
		return "", err
	}
	for _, e := range st.Engines {
		if e.EngineID == p.id("p") && e.Submission.RingPushes > e.Submission.MessagePushes {
			return "ring", nil
		}
	}
	return "message", nil
}

// ready gives the rig's memory blocks of that size, moves everything once and verifies it.
func (s *session) ready(ctx context.Context, r *rig, row *Row) error {
	if err := r.lend(ctx, blockLayout(row.BlockBytes)); err != nil {
		return err
	}
	var err error
	if row.Verified, err = r.verify(ctx); err != nil {
		return err
	}
	row.SetupMicros = median(r.pairs[0].setup)
	s.r.Submission, err = submission(ctx, s.rig.pairs[0])
	return err
}

// beside is what a transport is held against.
func (s *session) beside(ctx context.Context, r *rig, t string, block int, bytes int64) []contestant {
	if t == "rdma" {
		return s.perf.contestants(block, bytes, r.channelLanes(ctx))
	}
	return s.lim.contestants(t, block, bytes)
}

// sizes measures the rate by block size.
func (s *session) sizes(ctx context.Context, t string) error {
	for _, block := range s.p.blocks {
		row := Row{Part: partSizes, Transport: t, BlockBytes: block, Lanes: s.o.Lanes, Engines: 1}
		if err := s.ready(ctx, s.rig, &row); err != nil {
			return err
		}
		bytes, err := s.runBytes(ctx, s.rig)
		if err != nil {
			return err
		}
		list := []contestant{{name: ours, run: func(ctx context.Context) (Measure, error) { return s.rig.move(ctx, bytes) }}}
		list = append(list, s.beside(ctx, s.rig, t, block, bytes)...)
		if t == "tcp" {
			list = append(list, s.iperf.contestants(bytes)...)
		}
		for _, p := range s.peers {
			if err := s.verifyPeer(p, block); err != nil {
				s.note("%s over %s, blocks of %d bytes: not measured, %v", p.name, t, block, err)
				continue
			}
			list = append(list, contestant{name: p.name, what: p.what, run: func(context.Context) (Measure, error) {
				return p.move(block, 0, min(peerBytes, max(int64(block)*8192, peerBytes/4), s.o.Region))
			}})
		}
		if err := s.race(ctx, s.rig, &row, list); err != nil {
			return err
		}
	}
	return nil
}

// timer is one whose single writes can be timed.
type timer struct {
	name string
	run  func() ([]float64, error)
}

// latency measures one block at a time, and the same with messages in place of the ring.
func (s *session) latency(ctx context.Context, t string) error {
	o := s.rigOptions(t, s.o.Lanes, 1)
	o.messages = true
	messages, err := newRig(ctx, o)
	if err != nil {
		return err
	}
	return errors.Join(s.latencies(ctx, t, messages), messages.close())
}

func (s *session) latencies(ctx context.Context, t string, messages *rig) error {
	s.contestant(t, oursMessages, "the same, engines that do not use the ring in shared memory")
	for _, block := range s.p.latencyBlocks {
		if err := s.ready(ctx, s.rig, &Row{BlockBytes: block}); err != nil {
			return err
		}
		if err := messages.lend(ctx, blockLayout(block)); err != nil {
			return err
		}
		count := min(s.p.samples, int(s.o.Region)/block)
		paced := func(r *rig) func() ([]float64, error) {
			return func() ([]float64, error) {
				_, took, err := r.pairs[0].paced(ctx, 1, count)
				return took, err
			}
		}
		list := []timer{{ours, paced(s.rig)}, {oursMessages, paced(messages)}}
		if t == "rdma" && s.perf != nil {
			s.contestant(t, writeLat, "perftest on "+portName(&s.ports[0])+", half of a round trip: no acknowledgement to the engine, and both ends poll memory without rest")
			list = append(list, timer{writeLat, func() ([]float64, error) { return s.perf.latency(ctx, block, count) }})
		}
		for _, p := range s.peers {
			list = append(list, timer{p.name, func() ([]float64, error) { return p.latency(block, count) }})
		}
		samples, err := s.time(ctx, fmt.Sprintf("one block of %s over %s", size(block), t), list)
		for _, c := range list {
			if rounds := samples[c.name]; len(rounds) > 0 {
				l := latencyRow(rounds)
				l.Transport, l.BlockBytes, l.Name = t, block, c.name
				s.r.Latency = append(s.r.Latency, l)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// time lets each take its samples once a round, in an order that is reversed every other round.
func (s *session) time(ctx context.Context, what string, list []timer) (map[string][][]float64, error) {
	samples := map[string][][]float64{}
	failed := map[string]bool{}
	list = slices.Clone(list)
	first := list[0].name
	for round := range s.o.Rounds {
		for _, c := range list {
			if failed[c.name] {
				continue
			}
			took, err := c.run()
			switch {
			case ctx.Err() != nil:
				return samples, context.Cause(ctx)
			case err == nil:
				samples[c.name] = append(samples[c.name], took)
				fmt.Fprintf(s.o.Progress, "%s, round %d of %d: %s p50 %.0f us\n", what, round+1, s.o.Rounds, c.name, quantile(took, 0.5))
			case c.name == first:
				return samples, err
			default:
				failed[c.name] = true
				s.note("%s, %s: not measured, %v", c.name, what, err)
			}
		}
		slices.Reverse(list)
	}
	return samples, nil
}

func latencyRow(rounds [][]float64) LatencyRow {
	all := slices.Concat(rounds...)
	l := LatencyRow{Samples: len(all), P50: quantile(all, 0.5), P90: quantile(all, 0.9), P99: quantile(all, 0.99), P999: quantile(all, 0.999), Max: slices.Max(all)}
	for _, r := range rounds {
		l.Rounds = append(l.Rounds, LatencyRound{P50: quantile(r, 0.5), P99: quantile(r, 0.99)})
	}
	return l
}

// batchBytes is what one run of a batch size moves at most: single blocks are slow.
const batchBytes = 64 * mib

// batches measures one request at a time of so many blocks.
func (s *session) batches(ctx context.Context, t string) error {
	const block = 64 * kib
	first := Row{BlockBytes: block}
	if err := s.ready(ctx, s.rig, &first); err != nil {
		return err
	}
	for _, batch := range s.p.batches {
		if batch > int(s.o.Region)/block {
			continue
		}
		row := Row{Part: partBatches, Transport: t, BlockBytes: block, BatchBlocks: batch, Lanes: s.o.Lanes, Engines: 1, Verified: first.Verified, SetupMicros: first.SetupMicros}
		bytes := min(batchBytes*int64(min(batch, 8)), s.o.Region)
		list := []contestant{{name: ours, run: func(ctx context.Context) (Measure, error) {
			m, _, err := s.rig.pairs[0].paced(ctx, batch, max(int(bytes)/block/batch, 1))
			return m, err
		}}}
		for _, p := range s.peers {
			list = append(list, contestant{name: p.name, what: p.what, run: func(context.Context) (Measure, error) { return p.move(block, batch, min(bytes, peerBytes)) }})
		}
		if err := s.race(ctx, s.rig, &row, list); err != nil {
			return err
		}
	}
	return nil
}

// lanes measures channels of other widths, each beside the loops.
func (s *session) lanes(ctx context.Context, t string) error {
	for _, lanes := range []int{1, 2, 4} {
		if err := s.withRig(ctx, t, lanes, 1, func(r *rig) error {
			for _, block := range s.p.laneBlocks {
				row := Row{Part: partLanes, Transport: t, BlockBytes: block, Lanes: lanes, Engines: 1}
				if err := s.ready(ctx, r, &row); err != nil {
					return err
				}
				bytes, err := s.runBytes(ctx, r)
				if err != nil {
					return err
				}
				list := []contestant{{name: ours, run: func(ctx context.Context) (Measure, error) { return r.move(ctx, bytes) }}}
				if err := s.race(ctx, r, &row, append(list, s.beside(ctx, r, t, block, bytes)...)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) withRig(ctx context.Context, t string, lanes, engines int, use func(*rig) error) error {
	r, err := s.newRig(ctx, t, lanes, engines)
	if err != nil {
		return err
	}
	return errors.Join(use(r), r.close())
}

// engines measures several pairs of engines at a time on the same daemons.
func (s *session) engines(ctx context.Context, t string) error {
	const block = 64 * kib
	for _, engines := range s.p.engines {
		if err := s.withRig(ctx, t, s.o.Lanes, engines, func(r *rig) error {
			row := Row{Part: partEngines, Transport: t, BlockBytes: block, Lanes: s.o.Lanes, Engines: engines}
			if err := s.ready(ctx, r, &row); err != nil {
				return err
			}
			var rounds [][]float64
			list := []contestant{{name: ours, run: func(ctx context.Context) (Measure, error) {
				m, rates, err := r.rush(ctx)
				rounds = append(rounds, rates)
				return m, err
			}}}
			if t != "rdma" { // where devices are measured by perftest, which has one pair of ends
				list = append(list, s.lim.contestants(t, block, s.o.Bytes)[0])
			}
			row.Fairness = &Fairness{}
			err := s.race(ctx, r, &row, list)
			row.Fairness.fill(rounds)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fairness) fill(rounds [][]float64) {
	var index, least []float64
	for _, rates := range rounds {
		j, m := jain(rates)
		index, least = append(index, j), append(least, m)
	}
	f.Jain, f.MinOverMax = median(index), median(least)
	for e := range rounds[0] {
		var v []float64
		for _, rates := range rounds {
			v = append(v, rates[e])
		}
		f.GBps = append(f.GBps, median(v))
	}
}
