package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headrace/headrace/transfer"
)

var (
	channelRailLabels = []string{"peer", "transport", "dialled", "rail", "peer_rail"}

	descPairSent   = prometheus.NewDesc("headrace_channel_rail_sent_bytes_total", "Bytes sent over a rail and completed.", channelRailLabels, nil)
	descPairLanded = prometheus.NewDesc("headrace_channel_rail_landed_bytes_total", "Bytes landed over a rail.", channelRailLabels, nil)
	descPairPiece  = prometheus.NewDesc("headrace_channel_rail_piece_seconds", "Mean time from posting a piece on a rail to its completion.", channelRailLabels, nil)
	descPairSpeed  = prometheus.NewDesc("headrace_channel_rail_speed_bytes_per_second", "Rate of a rail's lanes together while they have something to send.", channelRailLabels, nil)
	descPairLanes  = prometheus.NewDesc("headrace_channel_rail_lanes_up", "Lanes of a rail in working order.", channelRailLabels, nil)
	descPairFailed = prometheus.NewDesc("headrace_channel_rail_lanes_failed_total", "Lanes of a rail that failed.", channelRailLabels, nil)
)

// collectRails tells how the rails of one peer's channels do; those of equal names are added up.
func collectRails(in []transfer.RailStatus, peer, dialled string, ch chan<- prometheus.Metric) {
	type key struct{ transport, name, peer string }
	sums := map[key]transfer.RailStatus{}
	for i := range in {
		r := &in[i]
		k := key{r.Transport, r.Name, r.Peer}
		s := sums[k]
		s.BytesSent += r.BytesSent
		s.BytesLanded += r.BytesLanded
		s.SpeedBps += r.SpeedBps
		s.LanesUp += r.LanesUp
		s.LanesFailed += r.LanesFailed
		s.PieceMicros = max(s.PieceMicros, r.PieceMicros)
		sums[k] = s
	}
	for k, s := range sums {
		labels := []string{peer, k.transport, dialled, k.name, k.peer}
		for _, m := range []struct {
			d *prometheus.Desc
			t prometheus.ValueType
			v float64
		}{
			{descPairSent, prometheus.CounterValue, float64(s.BytesSent)}, {descPairLanded, prometheus.CounterValue, float64(s.BytesLanded)},
			{descPairPiece, prometheus.GaugeValue, s.PieceMicros / 1e6}, {descPairSpeed, prometheus.GaugeValue, s.SpeedBps},
			{descPairLanes, prometheus.GaugeValue, float64(s.LanesUp)}, {descPairFailed, prometheus.CounterValue, float64(s.LanesFailed)},
		} {
			ch <- prometheus.MustNewConstMetric(m.d, m.t, m.v, labels...)
		}
	}
}
