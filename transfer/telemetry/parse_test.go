package telemetry

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer"
)

func TestOwnCgroup(t *testing.T) {
	const hybrid = "9:name=systemd:/\n4:memory:/box\n0::/user/a\n"
	for name, c := range map[string]struct{ cgroup, mounts, want string }{
		"unified":     {"0::/system.slice/headrace.service\n", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/system.slice/headrace.service"},
		"hybrid":      {hybrid, "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n30 24 0:26 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified/user/a"},
		"container":   {"0::/\n", "30 24 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n", "/sys/fs/cgroup"},
		"bound part":  {"0::/pod/x\n", "30 24 0:26 /pod /mnt rw - cgroup2 cgroup2 rw\n", "/mnt/x"},
		"other part":  {"0::/pod/x\n", "30 24 0:26 /other /mnt rw - cgroup2 cgroup2 rw\n", ""},
		"version one": {"4:memory:/box\n", "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ""},
		"not mounted": {"0::/x\n", "31 24 0:27 / / rw - ext4 /dev/vda rw\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ownCgroup(func(file string) ([]byte, error) {
				if strings.HasSuffix(file, "mountinfo") {
					return []byte(c.mounts), nil
				}
				return []byte(c.cgroup), nil
			})
			if got != c.want || errors.Is(err, errNoCgroup) != (c.want == "") {
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func FuzzOwnCgroup(f *testing.F) {
	f.Add("0::/a\n", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	f.Fuzz(func(t *testing.T, cgroup, mounts string) {
		dir, err := ownCgroup(func(file string) ([]byte, error) {
			if strings.HasSuffix(file, "mountinfo") {
				return []byte(mounts), nil
			}
			return []byte(cgroup), nil
		})
		if err == nil && dir == "" {
			t.Error("neither a folder nor an error")
		}
	})
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		err    error
		answer Answer
		remedy string
	}{
		{nil, Yes, ""},
		{fmt.Errorf("load programs: %w", unix.EPERM), No, "CAP_BPF"},
		{fmt.Errorf("attach: %w", ebpf.ErrNotSupported), No, "kernel"},
		{errNoCgroup, No, "mount -t cgroup2"},
		{unix.ENOMEM, Unknown, ""},
		{errNothing, Unknown, ""},
	} {
		got := judge("sockets", c.err)
		if got.Answer != c.answer || !strings.Contains(got.Remedy, c.remedy) || c.remedy == "" && got.Remedy != "" || got.Reason == "" {
			t.Errorf("%v: %+v", c.err, got)
		}
	}
}

// A card's own counters, and soft RoCE's, mean the same under other names.
func TestCountersOfDevices(t *testing.T) {
	sysfs := fstest.MapFS{
		"class/infiniband/mlx5_0/device/vendor": {Data: []byte("0x15b3\n")},
	}
	for name, v := range map[string]string{
		"mlx5_0/ports/1/counters/port_xmit_packets": "1000", "mlx5_0/ports/1/counters/port_rcv_packets": "900", "mlx5_0/ports/1/counters/port_xmit_data": "250000",
		"mlx5_0/ports/1/counters/port_rcv_data": "1000", "mlx5_0/ports/1/hw_counters/packet_seq_err": "3", "mlx5_0/ports/1/hw_counters/local_ack_timeout_err": "4",
		"mlx5_0/ports/1/hw_counters/lifespan": "10", "mlx5_0/ports/1/hw_counters/odd": "what", "mlx5_0/ports/1/counters/VL15_dropped": "0",
		"rxe0/ports/1/hw_counters/sent_pkts": "70", "rxe0/ports/1/hw_counters/rcvd_pkts": "60", "rxe0/ports/1/hw_counters/completer_retry_err": "5",
		"rxe0/ports/1/hw_counters/duplicate_request": "2",
	} {
		sysfs["class/infiniband/"+name] = &fstest.MapFile{Data: []byte(v + "\n")}
	}
	tel := openFor(t, Config{Mode: Kernel, sysfs: sysfs})
	g := tel.Channel()
	defer g.Close()
	for _, device := range []string{"mlx5_0", "rxe0"} {
		defer g.Lane(transfer.Flow{Transport: "rdma", Queue: &transfer.QueuePair{Device: device, Port: 1, Num: 17, PeerNum: 18, PeerPort: netip.IPv6Loopback()}})()
	}
	if w := g.Wire(); w.SentPackets != 0 || !w.Rails || w.Source != sourceKernel {
		t.Errorf("before anything was sent: %+v", w)
	}
	set := func(name, v string) { sysfs["class/infiniband/"+name].Data = []byte(v + "\n") }
	set("mlx5_0/ports/1/counters/port_xmit_packets", "1500")
	set("mlx5_0/ports/1/counters/port_xmit_data", "375000")
	set("rxe0/ports/1/hw_counters/sent_pkts", "170")
	set("rxe0/ports/1/hw_counters/completer_retry_err", "6")
	if w := g.Wire(); w.SentPackets != 600 || w.SentBytes != 500000 || w.RetransmittedPackets != 1 {
		t.Errorf("%+v", w)
	}
	rails := tel.Rails()
	if len(rails) != 2 || rails[0].Device != "mlx5_0" || rails[0].Sent.Packets != 1500 || rails[0].Sent.RetransmittedPackets != 7 || rails[1].Received.RetransmittedPackets != 2 {
		t.Errorf("%+v", rails)
	}
	if _, there := rails[0].Counters["lifespan"]; there || !strings.Contains(rails[0].Why, "telemetry is set to kernel") {
		t.Errorf("%+v", rails[0])
	}
}

// Without eBPF the same figures come from TCP_INFO, also after the lane's end.
func TestTCPInfoInPlaceOfEBPF(t *testing.T) {
	l := listen(t)
	tel := openFor(t, Config{Mode: Kernel})
	p := connect(t, tel, l)
	send(t, p.dialled, p.accepted, 1<<20)
	w := p.near.Wire()
	if w.Source != sourceKernel || w.SentBytes < 1<<20 || w.SentPackets == 0 || w.RTTMicros <= 0 || !strings.Contains(w.Why, "telemetry is set to kernel") {
		t.Errorf("%+v", w)
	}
	if far := p.far.Wire(); far.ReceivedBytes < 1<<20 {
		t.Errorf("%+v", far)
	}
	p.endNear()
	p.dialled.Close()
	if after := p.near.Wire(); after.SentBytes != w.SentBytes {
		t.Errorf("%+v, before %+v", after, w)
	}
	p.near.Close()
	p.far.Close()
}

func TestTimes(t *testing.T) {
	var v Times
	v.Slots[11], v.Slots[20] = 90, 10 // to 2 us, to 1 ms
	v.Count, v.SumNS = 100, 9_000_000
	if s := v.sum(); s.P50Micros != 2.048 || s.P99Micros != 1048.576 || s.MeanMicros != 90 {
		t.Errorf("%+v", s)
	}
	if b := v.Buckets(); b[2048e-9] != 90 || b[1048576e-9] != 100 || b[1024e-9] != 0 {
		t.Errorf("%v", b)
	}
}

func TestParseMode(t *testing.T) {
	for _, s := range []string{"", "auto", "ebpf", "kernel", "off"} {
		if _, err := ParseMode(s); err != nil {
			t.Error(err)
		}
	}
	if _, err := ParseMode("all"); err == nil || !strings.Contains(err.Error(), "choose") {
		t.Error(err)
	}
}

// With ebpf alone, what cannot be attached is an error, with what to do about it.
func TestEBPFIsRefusedWhereItCannotBe(t *testing.T) {
	_, err := New(Config{Mode: EBPF, Cgroup: t.TempDir()})
	if err == nil {
		t.Fatal("programs were attached to a folder that is no cgroup")
	}
	if errors.Is(err, unix.EPERM) && !strings.Contains(err.Error(), "CAP_BPF") {
		t.Error(err)
	}
	tel, err := New(Config{Mode: Auto, Cgroup: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer tel.Close()
	if s := tel.Status().Sources[0]; s.From != sourceKernel || s.Why == "" {
		t.Errorf("%+v", s)
	}
}
