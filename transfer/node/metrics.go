package node

import (
	"slices"
	"strconv"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics is what operators graph. Counts and gauges are read off the engine's status when scraped, durations are
// observed as they happen.
type metrics struct {
	fence *prometheus.HistogramVec
	lease *prometheus.HistogramVec
	ended *prometheus.CounterVec
	bytes *prometheus.CounterVec
}

var _ transfer.Metrics = (*metrics)(nil)

func newMetrics() *metrics {
	return &metrics{
		fence: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "headrace_fence_seconds", Help: "How long fencing a lease took.",
			Buckets: prometheus.ExponentialBuckets(0.00001, 4, 10)}, []string{"side", "forced"}),
		lease: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "headrace_lease_seconds", Help: "Life of leases that ended.",
			Buckets: prometheus.ExponentialBuckets(0.001, 3, 11)}, []string{"side", "state"}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headrace_leases_ended_total", Help: "Leases that ended, by the way they did."},
			[]string{"side", "state", "transport"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "headrace_lease_bytes_total", Help: "Bytes of leases that ended."},
			[]string{"side", "state", "transport"}),
	}
}

// LeaseEnded satisfies transfer.Metrics.
func (m *metrics) LeaseEnded(side string, state transfer.LeaseState, transport string, bytes uint64, d time.Duration) {
	m.lease.WithLabelValues(side, state.String()).Observe(d.Seconds())
	m.ended.WithLabelValues(side, state.String(), transport).Inc()
	m.bytes.WithLabelValues(side, state.String(), transport).Add(float64(bytes))
}

// Fenced satisfies transfer.Metrics.
func (m *metrics) Fenced(side string, d time.Duration, forced bool) {
	m.fence.WithLabelValues(side, strconv.FormatBool(forced)).Observe(d.Seconds())
}

func (m *metrics) registry(s *server) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(m.fence, m.lease, m.ended, m.bytes, statusCollector{s})
	return r
}

// statusCollector turns a status snapshot into metrics.
type statusCollector struct{ s *server }

var (
	channelLabels = []string{"peer", "transport", "dialled"}
	methodLabels  = []string{"peer", "transport", "dialled", "direction", "run_bytes", "method"}

	descInfo       = prometheus.NewDesc("headrace_node_info", "The daemon.", []string{"node", "epoch"}, nil)
	descEngines    = prometheus.NewDesc("headrace_engines", "Engines attached.", nil, nil)
	descWaiting    = prometheus.NewDesc("headrace_tickets_waiting", "Tickets presented here to engines that are not attached.", nil, nil)
	descRegions    = prometheus.NewDesc("headrace_regions", "Regions lent.", nil, nil)
	descRegionSize = prometheus.NewDesc("headrace_region_bytes", "Memory lent.", nil, nil)
	descLeases     = prometheus.NewDesc("headrace_leases", "Living leases.", []string{"side", "state"}, nil)
	descRate       = prometheus.NewDesc("headrace_rate_limit_bytes_per_second", "Limit on sending; 0: none.", nil, nil)
	descSent       = prometheus.NewDesc("headrace_channel_sent_bytes_total", "Bytes sent and completed.", channelLabels, nil)
	descLanded     = prometheus.NewDesc("headrace_channel_landed_bytes_total", "Bytes landed.", channelLabels, nil)
	descSentRate   = prometheus.NewDesc("headrace_channel_sent_bytes_per_second", "Rate of sending over about two seconds.", channelLabels, nil)
	descLandedRate = prometheus.NewDesc("headrace_channel_landed_bytes_per_second", "Rate of landing over about two seconds.", channelLabels, nil)
	descRTT        = prometheus.NewDesc("headrace_channel_rtt_seconds", "Round trip of the channel's pings.", channelLabels, nil)
	descBacklog    = prometheus.NewDesc("headrace_channel_backlog_bytes", "Bytes pushed and not yet landed.", channelLabels, nil)
	descErrors     = prometheus.NewDesc("headrace_channel_errors_total", "Errors of the channel.", channelLabels, nil)
	descRedialled  = prometheus.NewDesc("headrace_channel_lanes_redialled_total", "Lanes that failed and were dialled again.", channelLabels, nil)
	descSpeed      = prometheus.NewDesc("headrace_channel_speed_bytes_per_second", "Rate of sending while there was something to send.", channelLabels, nil)
	descAltered    = prometheus.NewDesc("headrace_channel_pieces_altered_total", "Pieces that arrived altered.", channelLabels, nil)
	descRunCost    = prometheus.NewDesc("headrace_channel_run_cost_seconds_per_byte", "What a byte takes, by the mean size of a piece's runs, in either method.", methodLabels, nil)
	descRunPieces  = prometheus.NewDesc("headrace_channel_run_pieces_total", "Pieces of scattered runs, by method.", methodLabels, nil)
	descPushes     = prometheus.NewDesc("headrace_pushes_total", "Pushes of engines, by the way they came.", []string{"by"}, nil)
	descDoorbells  = prometheus.NewDesc("headrace_ring_doorbells_total", "Doorbells of rings, by who was woken.", []string{"woken"}, nil)
	descSpins      = prometheus.NewDesc("headrace_ring_spins_total", "Submissions found by looking, without a doorbell.", nil, nil)
	descOverflow   = prometheus.NewDesc("headrace_ring_overflow_total", "Completions that went as messages because the ring was full.", nil, nil)
	descFallbacks  = prometheus.NewDesc("headrace_channel_fallbacks_total", "Times that another transport had to carry because the channel's own had no lane.", channelLabels, nil)
	descOnSpare    = prometheus.NewDesc("headrace_channel_on_spare", "1 while another transport than the channel's own carries.", channelLabels, nil)
	descLanes      = prometheus.NewDesc("headrace_channel_lanes_up", "Lanes in working order.", channelLabels, nil)
)

// totals are counts since the daemon started.
var totals = []struct {
	desc *prometheus.Desc
	get  func(*transfer.Totals) uint64
}{
	total("headrace_sent_bytes_total", "Payload sent and completed.", func(t *transfer.Totals) uint64 { return t.BytesSent }),
	total("headrace_landed_bytes_total", "Payload landed, counted once.", func(t *transfer.Totals) uint64 { return t.BytesLanded }),
	total("headrace_pieces_duplicate_total", "Pieces that had landed before.", func(t *transfer.Totals) uint64 { return t.PiecesDuplicate }),
	total("headrace_pieces_discarded_total", "Pieces of leases that had ended, or broken off by the sender.", func(t *transfer.Totals) uint64 { return t.PiecesDiscarded }),
	total("headrace_pieces_verified_total", "Pieces compared with the checksum they came with.", func(t *transfer.Totals) uint64 { return t.PiecesVerified }),
	total("headrace_pieces_altered_total", "Pieces that arrived with another checksum than they were sent with.", func(t *transfer.Totals) uint64 { return t.PiecesAltered }),
	total("headrace_pieces_resent_total", "Pieces sent again because they arrived altered.", func(t *transfer.Totals) uint64 { return t.PiecesResent }),
	total("headrace_leases_presented_total", "Leases presented.", func(t *transfer.Totals) uint64 { return t.LeasesPresented }),
	total("headrace_tickets_refused_total", "Tickets refused.", func(t *transfer.Totals) uint64 { return t.TicketsRefused }),
	total("headrace_tickets_recalled_total", "Tickets made void by who holds the cluster key.", func(t *transfer.Totals) uint64 { return t.TicketsRecalled }),
	total("headrace_channels_opened_total", "Channels opened.", func(t *transfer.Totals) uint64 { return t.ChannelsOpened }),
	total("headrace_channels_died_total", "Channels that died.", func(t *transfer.Totals) uint64 { return t.ChannelsDied }),
	total("headrace_handshakes_failed_total", "Handshakes that failed.", func(t *transfer.Totals) uint64 { return t.HandshakesFailed }),
	total("headrace_fences_forced_total", "Fences that needed a lane to be aborted.", func(t *transfer.Totals) uint64 { return t.FencesForced }),
}

func total(name, help string, get func(*transfer.Totals) uint64) (t struct {
	desc *prometheus.Desc
	get  func(*transfer.Totals) uint64
}) {
	t.desc, t.get = prometheus.NewDesc(name, help, nil, nil), get
	return t
}

func (statusCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descInfo, descEngines, descWaiting, descRegions, descRegionSize, descLeases, descRate, descSent, descLanded,
		descSentRate, descLandedRate, descRTT, descBacklog, descErrors, descLanes, descFallbacks, descOnSpare, descPairSent, descPairLanded, descPairPiece, descPairSpeed, descPairLanes, descPairFailed, descRedialled, descSpeed, descAltered, descRunCost, descRunPieces,
		descPushes, descDoorbells, descSpins, descOverflow} {
		ch <- d
	}
	for _, d := range wireDescs {
		ch <- d
	}
	for _, t := range totals {
		ch <- t.desc
	}
}

func (c statusCollector) Collect(ch chan<- prometheus.Metric) {
	st := c.s.eng.Status()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descInfo, 1, st.NodeID, strconv.FormatUint(st.Epoch, 10))
	gauge(descWaiting, float64(st.Waiting))
	gauge(descRate, float64(st.RateLimitBps))
	engines, regions, size := 0, 0, uint64(0)
	for _, e := range st.Engines {
		if e.MemberOf == "" { // else it is a rank of one
			engines++
		}
		regions += len(e.Regions)
		for _, r := range e.Regions {
			size += r.Bytes
		}
	}
	gauge(descEngines, float64(engines))
	gauge(descRegions, float64(regions))
	gauge(descRegionSize, float64(size))
	leases := map[[2]string]int{}
	for _, side := range []string{"source", "target"} {
		for _, state := range []string{"open", "bound"} {
			leases[[2]string{side, state}] = 0 // a graph needs the zeros too
		}
	}
	for _, l := range st.Leases {
		leases[[2]string{l.Side, l.State}]++
	}
	for k, n := range leases {
		gauge(descLeases, float64(n), k[0], k[1])
	}
	collectChannels(st.Channels, ch)
	collectTelemetry(c.s.tel, ch)
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	subs := c.s.submissions()
	count(descPushes, subs.RingPushes, "ring")
	count(descPushes, subs.MessagePushes, "message")
	count(descDoorbells, subs.Wakeups, "daemon")
	count(descDoorbells, subs.Doorbells, "engine")
	count(descSpins, subs.Spins)
	count(descOverflow, subs.OverflowCompletions)
	for _, t := range totals {
		ch <- prometheus.MustNewConstMetric(t.desc, prometheus.CounterValue, float64(t.get(&st.Totals)))
	}
}

// collectChannels adds up ends with equal labels: two daemons may have dialled each other more than once over time.
func collectChannels(in []transfer.ChannelStatus, ch chan<- prometheus.Metric) {
	type key struct {
		peer, transport string
		dialled         bool
	}
	sum := map[key]transfer.ChannelStatus{}
	for _, c := range in {
		k := key{c.PeerNode, c.Transport, c.Dialled}
		s := sum[k]
		s.BytesSent += c.BytesSent
		s.BytesLanded += c.BytesLanded
		s.SentBps += c.SentBps
		s.LandedBps += c.LandedBps
		s.BacklogBytes += c.BacklogBytes
		s.Errors += c.Errors
		s.LanesUp += c.LanesUp
		s.Altered += c.Altered
		s.SpeedBps = max(s.SpeedBps, c.SpeedBps)
		s.Methods = append(s.Methods, c.Methods...)
		s.Redialled += c.Redialled
		addWire(&s.Wire, &c.Wire)
		s.Fallbacks += c.Fallbacks
		s.Rails = append(s.Rails, c.Rails...)
		if c.Carrier != "" && c.Carrier != c.Transport {
			s.Carrier = c.Carrier
		}
		s.RTTMicros = max(s.RTTMicros, c.RTTMicros)
		sum[k] = s
	}
	for k, c := range sum {
		labels := []string{k.peer, k.transport, strconv.FormatBool(k.dialled)}
		for _, m := range []struct {
			d *prometheus.Desc
			t prometheus.ValueType
			v float64
		}{
			{descSent, prometheus.CounterValue, float64(c.BytesSent)}, {descLanded, prometheus.CounterValue, float64(c.BytesLanded)},
			{descSentRate, prometheus.GaugeValue, c.SentBps}, {descLandedRate, prometheus.GaugeValue, c.LandedBps},
			{descRTT, prometheus.GaugeValue, c.RTTMicros / 1e6}, {descBacklog, prometheus.GaugeValue, float64(c.BacklogBytes)},
			{descErrors, prometheus.CounterValue, float64(c.Errors)}, {descSpeed, prometheus.GaugeValue, c.SpeedBps}, {descAltered, prometheus.CounterValue, float64(c.Altered)}, {descRedialled, prometheus.CounterValue, float64(c.Redialled)}, {descLanes, prometheus.GaugeValue, float64(c.LanesUp)},
			{descFallbacks, prometheus.CounterValue, float64(c.Fallbacks)}, {descOnSpare, prometheus.GaugeValue, float64(min(len(c.Carrier), 1))},
		} {
			ch <- prometheus.MustNewConstMetric(m.d, m.t, m.v, labels...)
		}
		collectMethods(c.Methods, labels, ch)
		collectWire(&c.Wire, labels, ch)
		collectRails(c.Rails, k.peer, labels[2], ch)
	}
}

// collectMethods tells what direct and staged cost, class by class.
func collectMethods(in []transfer.MethodStatus, labels []string, ch chan<- prometheus.Metric) {
	type key struct {
		direction string
		run       uint64
		mode      transfer.Mode
	}
	type sum struct {
		pieces uint64
		cost   float64
	}
	sums := map[key]sum{}
	for _, m := range in {
		for mode, s := range [...]sum{transfer.Direct: {m.DirectCount, m.DirectCost}, transfer.Staged: {m.StagedCount, m.StagedCost}} {
			k := key{m.Direction, m.RunBytes, transfer.Mode(mode)}
			sums[k] = sum{sums[k].pieces + s.pieces, max(sums[k].cost, s.cost)}
		}
	}
	for k, s := range sums {
		if s.pieces == 0 {
			continue
		}
		l := append(slices.Clone(labels), k.direction, strconv.FormatUint(k.run, 10), k.mode.String())
		ch <- prometheus.MustNewConstMetric(descRunPieces, prometheus.CounterValue, float64(s.pieces), l...)
		ch <- prometheus.MustNewConstMetric(descRunCost, prometheus.GaugeValue, s.cost/1024/1e9, l...)
	}
}
