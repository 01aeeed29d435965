package node

import (
	"strconv"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/telemetry"
	"github.com/prometheus/client_golang/prometheus"
)

// What was measured from outside: see package telemetry. Labels are channels, rails and a handful of words.
var (
	railLabels = []string{"device", "port", "direction"}

	descWireSource   = prometheus.NewDesc("headrace_channel_wire_info", "Where a channel's wire figures come from: ebpf, kernel (TCP_INFO or the device's counters) or mixed.", append(channelLabels[:3:3], "source"), nil)
	descWireSent     = prometheus.NewDesc("headrace_channel_wire_sent_bytes_total", "Payload sent, as often as it was sent.", channelLabels, nil)
	descWireReceived = prometheus.NewDesc("headrace_channel_wire_received_bytes_total", "Payload received, as often as it came.", channelLabels, nil)
	descWirePackets  = prometheus.NewDesc("headrace_channel_wire_packets_total", "Packets, by direction.", append(channelLabels[:3:3], "direction"), nil)
	descWireAgain    = prometheus.NewDesc("headrace_channel_wire_retransmitted_bytes_total", "Payload sent again.", channelLabels, nil)
	descWireAgainN   = prometheus.NewDesc("headrace_channel_wire_retransmitted_packets_total", "Packets sent again.", channelLabels, nil)
	descWireRTT      = prometheus.NewDesc("headrace_channel_wire_rtt_seconds", "Smoothed round trip of the channel's lanes, as the kernel measures it; 0: it does not.", channelLabels, nil)
	descSource       = prometheus.NewDesc("headrace_telemetry_info", "What measures sockets, packets and posts: ebpf, kernel or none.", []string{"of", "source"}, nil)
	descRailPackets  = prometheus.NewDesc("headrace_rail_packets_total", "Packets of a rail, of whatever channel.", append(railLabels[:3:3], "kind"), nil)
	descRailBytes    = prometheus.NewDesc("headrace_rail_data_bytes_total", "Payload of a rail's packets; 0 where the device does not count it.", railLabels, nil)
	descRailAgain    = prometheus.NewDesc("headrace_rail_retransmitted_packets_total", "Packets sent again, or come again; of a device's counters how often that was, the least that it can be.", railLabels, nil)
	descPostTime     = prometheus.NewDesc("headrace_post_to_completion_seconds", "From posting to completion of RDMA work, by eBPF.", nil, nil)

	wireDescs = []*prometheus.Desc{descWireSource, descWireSent, descWireReceived, descWirePackets, descWireAgain, descWireAgainN, descWireRTT, descSource, descRailPackets, descRailBytes, descRailAgain, descPostTime}
)

// collectWire tells one channel's wire figures.
func collectWire(w *transfer.Wire, labels []string, ch chan<- prometheus.Metric) {
	if w.Source == "" || w.Source == "none" {
		return
	}
	with := func(more string) []string { return append(labels[:len(labels):len(labels)], more) }
	count := func(d *prometheus.Desc, v uint64, labels []string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	ch <- prometheus.MustNewConstMetric(descWireSource, prometheus.GaugeValue, 1, with(w.Source)...)
	ch <- prometheus.MustNewConstMetric(descWireRTT, prometheus.GaugeValue, w.RTTMicros/1e6, labels...)
	if w.Rails {
		return // those of the rails are told with them, once
	}
	count(descWireSent, w.SentBytes, labels)
	count(descWireReceived, w.ReceivedBytes, labels)
	count(descWirePackets, w.SentPackets, with("sent"))
	count(descWirePackets, w.ReceivedPackets, with("received"))
	count(descWireAgain, w.RetransmittedBytes, labels)
	count(descWireAgainN, w.RetransmittedPackets, labels)
}

// addWire adds up channels with equal labels.
func addWire(sum, w *transfer.Wire) {
	switch {
	case sum.Source == "" || sum.Source == "none":
		sum.Source = w.Source
	case w.Source != "none" && w.Source != sum.Source:
		sum.Source = "mixed"
	}
	sum.SentBytes += w.SentBytes
	sum.ReceivedBytes += w.ReceivedBytes
	sum.SentPackets += w.SentPackets
	sum.ReceivedPackets += w.ReceivedPackets
	sum.RetransmittedBytes += w.RetransmittedBytes
	sum.RetransmittedPackets += w.RetransmittedPackets
	sum.RTTMicros = max(sum.RTTMicros, w.RTTMicros)
	sum.Rails = sum.Rails || w.Rails
}

// collectTelemetry tells what is known of rails, and of posts.
func collectTelemetry(t *telemetry.Telemetry, ch chan<- prometheus.Metric) {
	if t == nil {
		return
	}
	s := t.Status()
	for _, x := range s.Sources {
		ch <- prometheus.MustNewConstMetric(descSource, prometheus.GaugeValue, 1, x.Of, x.From)
	}
	for _, r := range s.Rails {
		for direction, p := range map[string]telemetry.Packets{"sent": r.Sent, "received": r.Received} {
			labels := []string{r.Device, strconv.Itoa(r.Port), direction}
			count := func(d *prometheus.Desc, v uint64, more ...string) {
				ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), append(labels[:3:3], more...)...)
			}
			count(descRailPackets, p.Packets, "all")
			count(descRailPackets, p.DataPackets, "data")
			count(descRailPackets, p.Acks, "ack")
			count(descRailPackets, p.Naks, "nak")
			count(descRailBytes, p.DataBytes)
			count(descRailAgain, p.RetransmittedPackets)
		}
	}
	if times, ok := t.Times(); ok {
		ch <- prometheus.MustNewConstHistogram(descPostTime, times.Count, float64(times.SumNS)/1e9, times.Buckets())
	}
}
