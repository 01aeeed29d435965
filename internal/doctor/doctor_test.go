package doctor

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/transfer/telemetry"
)

func files(m map[string]string) fstest.MapFS {
	out := fstest.MapFS{}
	for name, text := range m {
		if to, is := strings.CutPrefix(text, "-> "); is {
			out[name] = &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink | 0o777}
		} else {
			out[name] = &fstest.MapFile{Data: []byte(text)}
		}
	}
	return out
}

func TestThisHostIsFit(t *testing.T) {
	r := Run(os.DirFS("/"))
	var table, doc bytes.Buffer
	if err := r.Print(&table, false); err != nil {
		t.Fatal(err)
	}
	if err := r.Print(&doc, true); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", table.String())
	if !r.OK() {
		t.Error("something that is needed is missing")
	}
	if !json.Valid(doc.Bytes()) || !strings.Contains(doc.String(), `"ok": true`) {
		t.Errorf("the document is %s", doc.String())
	}
	checkWords(t, r)
}

// checkWords wants every check to say what it found, and every lack what helps.
func checkWords(t *testing.T, r *Report) {
	t.Helper()
	seen := make(map[string]bool)
	for _, c := range r.Checks {
		if c.Group == "" || c.Name == "" || c.Detail == "" {
			t.Errorf("a check says too little: %+v", c)
		}
		if c.Answer == Lacking && c.Remedy == "" {
			t.Errorf("no remedy: %+v", c)
		}
		if c.Answer == Yes && c.Command != "" {
			t.Errorf("a command for what is well: %+v", c)
		}
		if seen[c.Group+c.Name] {
			t.Errorf("two checks are called %s, %s", c.Group, c.Name)
		}
		seen[c.Group+c.Name] = true
	}
}

const (
	gidBase = "sys/class/infiniband/rxe0/ports/1/"
	pciBase = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/"
)

// softHost has soft RoCE on d0 and lacks nothing.
func softHost() map[string]string {
	return map[string]string{
		"proc/cpuinfo": "flags : fpu avx2 fma\n", "proc/sys/kernel/osrelease": "6.1.0-1-amd64\n", "proc/self/status": "CapEff:\t0000000000000000\n",
		"proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n", "proc/self/mounts": "none /sys/fs/cgroup cgroup2 rw 0 0\n",
		"sys/devices/system/clocksource/clocksource0/current_clocksource":       "tsc\n",
		"sys/devices/system/clocksource/clocksource0/available_clocksource":     "tsc hpet\n",
		"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor":                  "performance\n",
		"sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "8\n",
		"sys/kernel/mm/transparent_hugepage/enabled":                            "always madvise [never]",
		"sys/kernel/btf/vmlinux":                                                "x", "sys/bus/event_source/devices/uprobe/type": "7", "proc/sys/kernel/perf_event_paranoid": "-1",
		"sys/module/ib_uverbs/refcnt": "0", "sys/module/rdma_rxe/refcnt": "0",
		"sys/class/infiniband_verbs/uverbs0/ibdev": "rxe0\n", "sys/class/infiniband_verbs/uverbs0/dev": "231:192\n", "dev/infiniband/uverbs0": "",
		"sys/class/infiniband/rxe0/parent": "d0\n",
		gidBase + "state":                  "4: ACTIVE\n", gidBase + "link_layer": "Ethernet\n", gidBase + "rate": "2.5 Gb/sec (1X SDR)\n",
		gidBase + "gids/0": "fe80:0000:0000:0000:0000:00ff:fe00:0001\n", gidBase + "gid_attrs/types/0": "RoCE v2\n", gidBase + "gid_attrs/ndevs/0": "d0\n",
		gidBase + "gids/1": "0000:0000:0000:0000:0000:ffff:0a09:0001\n", gidBase + "gid_attrs/types/1": "RoCE v2\n", gidBase + "gid_attrs/ndevs/1": "d0\n",
		gidBase + "gids/2":      "0000:0000:0000:0000:0000:0000:0000:0000\n",
		"sys/class/net/d0/type": "1\n", "sys/class/net/d0/flags": "0x83\n", "sys/class/net/d0/mtu": "4200\n", "sys/class/net/lo/type": "772\n",
		"lib/modules/6.1.0-1-amd64/modules.dep": "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: x\nkernel/drivers/infiniband/core/ib_uverbs.ko.xz: x\n",
	}
}

// cardHost has a card at 01:00.0, behind the bridge 00:01.0, and lacks nothing.
func cardHost() map[string]string {
	m := map[string]string{}
	for name, text := range softHost() {
		m[strings.ReplaceAll(name, "rxe0", "mlx5_0")] = strings.ReplaceAll(text, "rxe0", "mlx5_0")
	}
	delete(m, "sys/class/infiniband/mlx5_0/parent")
	maps.Copy(m, map[string]string{
		"sys/class/infiniband/mlx5_0/device": "-> ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0",
		"sys/class/net/d0/device":            "-> ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0",
		"sys/bus/pci/devices/0000:01:00.0":   "-> ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0",
		"sys/bus/pci/devices/0000:00:01.0":   "-> ../../../devices/pci0000:00/0000:00:01.0",
		pciBase + "subsystem":                "-> ../../../../bus/pci", pciBase + "driver": "-> ../../../../bus/pci/drivers/mlx5_core",
		pciBase + "current_link_speed": "16.0 GT/s PCIe\n", pciBase + "max_link_speed": "16.0 GT/s PCIe\n", pciBase + "current_link_width": "16\n", pciBase + "max_link_width": "16\n",
		pciBase + "config":                                     configuration(expressControl, controlRelaxed),
		pciBase + "net/d0/mtu":                                 "4200",
		pciBase + "sriov_totalvfs":                             "8\n",
		pciBase + "sriov_numvfs":                               "2\n",
		"sys/devices/pci0000:00/0000:00:01.0/config":           configuration(0, 0),
		"sys/class/infiniband/mlx5_0/ports/1/hw_counters/none": "",
	})
	return m
}

// configuration is a PCI device's, with one byte of its express capability set, and access control that redirects nothing.
func configuration(at int, value byte) string {
	b := make([]byte, 4096)
	b[pciCapabilities], b[0x40], b[0x41], b[0x60] = 0x40, 0x01, 0x60, pciCapExpress
	b[0x60+at] |= value
	binary.LittleEndian.PutUint32(b[pciExtended:], 0x150<<20|0x0001)
	binary.LittleEndian.PutUint32(b[0x150:], pciExtACS)
	return string(b)
}

func redirecting() string {
	b := []byte(configuration(0, 0))
	b[0x150+acsControl] = acsRedirect
	return string(b)
}

// fake is a host of such files on which all else is well.
func fake(m map[string]string) *host {
	device := "rxe0"
	if _, card := m["sys/class/infiniband/mlx5_0/device"]; card {
		device = "mlx5_0"
	}
	return &host{
		root: files(m), verbs: func() cgo.Verbs { return cgo.Verbs{State: cgo.Listed, Devices: []string{device}} },
		ports: func(string, int) (library, error) {
			return library{ports: []cgo.PortAttr{{State: cgo.PortActive, MaxMTU: 4096, ActiveMTU: 4096}}}, nil
		},
		rlimit: func(int) (unix.Rlimit, error) {
			return unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil
		},
		access: func(string) error { return nil }, adjust: func() (unix.Timex, int, error) { return unix.Timex{Maxerror: 5000}, unix.TIME_OK, nil },
		pause: func(string) (pauseParam, error) { return pauseParam{}, unix.EOPNOTSUPP }, pfc: func(string) (pfcState, error) { return pfcState{1 << 3}, nil },
		bpf: func() bpfAnswers { return bpfAnswers{} }, cuda: func(string) gpus { return gpus{reason: "no GPU"} },
		seen: func() []telemetry.Capability {
			return []telemetry.Capability{{Name: "sockets", Answer: telemetry.Yes, Reason: "can be attached"}}
		},
		find: func(p string) bool { return p == "chronyc" },
	}
}

func TestHealthyHosts(t *testing.T) {
	for name, m := range map[string]map[string]string{"soft RoCE": softHost(), "card": cardHost()} {
		r := fake(m).run()
		for _, c := range r.Checks {
			if c.Answer != Yes {
				t.Errorf("%s: %+v", name, c)
			}
		}
		checkWords(t, r)
	}
}

// sick says what one change of a healthy host makes of one check.
type sick struct {
	card   bool
	files  map[string]string // a text of "-" takes the file away
	change func(h *host)
	check  string
	answer Answer
	detail string
	fix    string // the command
}

func without(names ...string) map[string]string {
	m := make(map[string]string)
	for _, n := range names {
		m[n] = "-"
	}
	return m
}

func limited(n uint64) func(h *host) {
	return func(h *host) {
		h.rlimit = func(int) (unix.Rlimit, error) { return unix.Rlimit{Cur: n, Max: n}, nil }
	}
}

func mtu(active uint32) func(h *host) {
	return func(h *host) {
		h.ports = func(string, int) (library, error) {
			return library{ports: []cgo.PortAttr{{MaxMTU: 4096, ActiveMTU: active}}, dmabuf: unix.EOPNOTSUPP}, nil
		}
	}
}

var sickHosts = map[string]sick{
	"no AVX2":        {files: map[string]string{"proc/cpuinfo": "flags : fpu\n"}, check: "CPU", answer: Lacking, detail: "cores"},
	"slow cores":     {files: map[string]string{"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave"}, check: "CPU governor", answer: Lacking, detail: "performance on 1, powersave on 1", fix: "echo performance | tee"},
	"mute cores":     {files: without("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"), check: "CPU governor", answer: Unknown, detail: "virtual"},
	"few files":      {change: limited(256), check: "open files", answer: Lacking, detail: "256", fix: "ulimit -n 65536"},
	"little memlock": {change: limited(65536), check: "locked memory", answer: Lacking, detail: "64 KiB", fix: "ulimit -l unlimited"},
	"memlock with the capability": {change: limited(65536), files: map[string]string{"proc/self/status": "CapEff:\t0000000000004000\n"},
		check: "locked memory", answer: Yes, detail: "CAP_IPC_LOCK"},
	"some memlock": {change: limited(4 << 30), check: "locked memory", answer: Yes, detail: "4096 MiB"},
	"free-running clock": {change: func(h *host) {
		h.adjust = func() (unix.Timex, int, error) { return unix.Timex{Status: unix.STA_UNSYNC}, unix.TIME_ERROR, nil }
	}, check: "clock", answer: Lacking, detail: "not synchronised", fix: "chronyc -a makestep"},
	"inexact clock": {change: func(h *host) {
		h.adjust = func() (unix.Timex, int, error) { return unix.Timex{Maxerror: 2_000_000}, unix.TIME_OK, nil }
		h.find = func(p string) bool { return p == "timedatectl" }
	}, check: "clock", answer: Lacking, detail: "2s", fix: "timedatectl set-ntp true"},
	"no clock": {change: func(h *host) {
		h.adjust = func() (unix.Timex, int, error) { return unix.Timex{}, 0, unix.EPERM }
	}, check: "clock", answer: Unknown, detail: "not permitted"},
	"slow clock source": {files: map[string]string{"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, check: "clock source", answer: Lacking, detail: "hpet",
		fix: "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"},
	"only slow clock sources": {files: map[string]string{"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet", "sys/devices/system/clocksource/clocksource0/available_clocksource": "hpet"},
		check: "clock source", answer: Lacking, detail: "no better one"},
	"no huge pages": {files: map[string]string{"sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "0"}, check: "huge pages", answer: Lacking, detail: "none",
		fix: "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"},
	"transparent pages": {files: map[string]string{"sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages": "0", "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never"},
		check: "huge pages", answer: Yes, detail: "transparent"},
	"huge pages on one node": {files: map[string]string{"sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages": "0"}, check: "huge pages", answer: Lacking, detail: "node0 8, node1 0",
		fix: "echo 512 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"},
	"small buffers": {files: map[string]string{"proc/sys/net/ipv4/tcp_wmem": "1 2 3"}, check: "buffers", answer: Lacking, detail: "0 KiB", fix: "sysctl -w net.ipv4.tcp_wmem="},
	"odd buffers":   {files: map[string]string{"proc/sys/net/ipv4/tcp_wmem": "a b c"}, check: "buffers", answer: Unknown, detail: "a b c"},
	"no buffers":    {files: without("proc/sys/net/ipv4/tcp_wmem"), check: "buffers", answer: Unknown, detail: "cannot be read"},

	"no library":   {change: verbs(cgo.Verbs{State: cgo.NoLibrary, Detail: "x"}), check: "library", answer: Lacking, detail: "libibverbs.so.1", fix: "apt-get install -y libibverbs1 ibverbs-providers"},
	"no cgo":       {change: verbs(cgo.Verbs{State: cgo.NotBuilt}), check: "library", answer: Lacking, detail: "without cgo"},
	"odd library":  {change: verbs(cgo.Verbs{State: cgo.Failed, Detail: "x"}), check: "library", answer: Unknown, detail: "x"},
	"no providers": {change: verbs(cgo.Verbs{State: cgo.Listed}), check: "providers", answer: Lacking, detail: "rxe0", fix: "apt-get install -y ibverbs-providers"},
	"no providers on Fedora": {change: verbs(cgo.Verbs{State: cgo.Listed}), files: map[string]string{"etc/os-release": "NAME=x\nID=fedora\n"}, check: "providers", answer: Lacking, detail: "rxe0",
		fix: "dnf install -y libibverbs"},
	"no ib_uverbs": {files: without("sys/module/ib_uverbs/refcnt", "sys/class/infiniband_verbs/uverbs0/ibdev", "sys/class/infiniband_verbs/uverbs0/dev"),
		check: "kernel modules", answer: Lacking, detail: "not loaded", fix: "modprobe ib_uverbs"},
	"no ib_uverbs to load": {files: map[string]string{"sys/module/ib_uverbs/refcnt": "-", "sys/class/infiniband_verbs/uverbs0/ibdev": "-", "sys/class/infiniband_verbs/uverbs0/dev": "-", "proc/sys/kernel/osrelease": "6.1.0-1-cloud-amd64"},
		check: "kernel modules", answer: Lacking, detail: "none to load", fix: "apt-get install -y linux-image-amd64"},
	"no device":            {change: noDevice, check: "devices", answer: Lacking, detail: "none", fix: "rdma link add rxe0 type rxe netdev d0"},
	"no device, no rxe":    {change: noDevice, files: without("sys/module/rdma_rxe/refcnt"), check: "devices", answer: Lacking, detail: "none", fix: "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev d0"},
	"no device file":       {files: without("dev/infiniband/uverbs0"), check: "device files", answer: Lacking, detail: "is not there", fix: "mkdir -p /dev/infiniband && mknod -m 0666 /dev/infiniband/uverbs0 c 231 192"},
	"closed device file":   {change: func(h *host) { h.access = func(string) error { return unix.EACCES } }, check: "device files", answer: Lacking, detail: "may not open", fix: "chmod 0666 /dev/infiniband/uverbs0"},
	"port switched off":    {files: map[string]string{gidBase + "state": "1: DOWN", "sys/class/net/d0/flags": "0x82"}, check: "rxe0/1 state", answer: Lacking, detail: "switched off", fix: "ip link set dev d0 up"},
	"port without carrier": {files: map[string]string{gidBase + "state": "1: DOWN"}, check: "rxe0/1 state", answer: Lacking, detail: "down, on d0"},
	"no subnet manager":    {files: map[string]string{gidBase + "state": "2: INIT", gidBase + "link_layer": "InfiniBand"}, check: "rxe0/1 state", answer: Lacking, detail: "subnet manager", fix: "apt-get install -y opensm"},
	"address of the link":  {files: without(gidBase + "gids/1"), check: "rxe0/1 address", answer: Lacking, detail: "GID index 0, RoCE v2, fe80:", fix: "ip addr add ADDRESS/PREFIX dev d0"},
	"only RoCE v1":         {files: map[string]string{gidBase + "gid_attrs/types/0": "IB/RoCE v1", gidBase + "gid_attrs/types/1": "IB/RoCE v1"}, check: "rxe0/1 address", answer: Lacking, detail: "none of them RoCE v2", fix: "ip addr add"},
	"no address":           {files: without(gidBase+"gids/0", gidBase+"gids/1"), check: "rxe0/1 address", answer: Lacking, detail: "no GID", fix: "ip addr add"},
	"an IPv6 address":      {files: map[string]string{gidBase + "gids/1": "2001:0db8:0000:0000:0000:0000:0000:0001"}, check: "rxe0/1 address", answer: Yes, detail: "GID index 1, RoCE v2, 2001:"},
	"MTU of Ethernet":      {change: mtu(1024), files: map[string]string{"sys/class/net/d0/mtu": "1500"}, check: "rxe0/1 MTU", answer: Lacking, detail: "1024 bytes; that of d0 is 1500", fix: "ip link set dev d0 mtu 4200"},
	"MTU of the device":    {change: mtu(1024), check: "rxe0/1 MTU", answer: Lacking, detail: "could do 4096"},
	"device does not open": {change: func(h *host) { h.ports = func(string, int) (library, error) { return library{}, unix.EMFILE } }, check: "rxe0/1 MTU", answer: Unknown, detail: "too many"},
	"no flow control":      {card: true, change: func(h *host) { h.pfc = func(string) (pfcState, error) { return pfcState{}, nil } }, check: "mlx5_0/1 congestion", answer: Lacking, detail: "no priority", fix: "dcb pfc set dev d0 prio-pfc all:off 3:on"},
	"mute about flow":      {card: true, change: muteFlow, check: "mlx5_0/1 congestion", answer: Unknown, detail: "tells nothing"},
	"flow control off":     {card: true, change: func(h *host) { muteFlow(h); h.pause = func(string) (pauseParam, error) { return pauseParam{}, nil } }, check: "mlx5_0/1 congestion", answer: Lacking, detail: "no flow", fix: "ethtool -A d0 rx on tx on"},
	"losses are shown":     {card: true, files: map[string]string{"sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence": "7"}, check: "mlx5_0/1 congestion", answer: Yes, detail: "7 packets out of order"},
	"narrow slot":          {card: true, files: map[string]string{pciBase + "current_link_width": "8"}, check: "mlx5_0 PCIe link", answer: Lacking, detail: "8 lanes of 16.0 GT/s PCIe, 16 lanes"},
	"strict ordering":      {card: true, files: map[string]string{pciBase + "config": configuration(0, 0)}, check: "mlx5_0 relaxed ordering", answer: Yes, detail: "may not"},
	"closed configuration": {card: true, files: map[string]string{pciBase + "config": configuration(0, 0)[:64]}, check: "mlx5_0 relaxed ordering", answer: Unknown, detail: "root"},
	"translating IOMMU":    {card: true, files: map[string]string{pciBase + "iommu_group/type": "DMA-FQ\n"}, check: "mlx5_0 IOMMU", answer: Lacking, detail: "DMA-FQ", fix: "update-grub"},
	"passing IOMMU":        {card: true, files: map[string]string{pciBase + "iommu_group/type": "identity\n"}, check: "mlx5_0 IOMMU", answer: Yes, detail: "passes"},
	"redirecting bridge":   {card: true, files: map[string]string{"sys/devices/pci0000:00/0000:00:01.0/config": redirecting()}, check: "mlx5_0 way to GPUs", answer: Lacking, detail: "0000:00:01.0", fix: "setpci -s 0000:00:01.0 ECAP_ACS+6.w=0000"},
	"no virtual functions": {card: true, files: map[string]string{pciBase + "sriov_numvfs": "0"}, check: "d0 virtual functions", answer: Lacking, detail: "none of 8", fix: "echo 4 > /sys/class/net/d0/device/sriov_numvfs"},
	"no dma-buf":           {card: true, change: mtu(4096), check: "mlx5_0 dma-buf", answer: Lacking, detail: "not supported"},
	"GPU without driver": {card: true, files: map[string]string{"sys/bus/pci/devices/0000:02:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:02:00.0/class": "0x030200"},
		change: withGPUs(gpus{reason: "libcuda.so.1 cannot be opened", remedy: "install the driver"}), check: "GPUs", answer: Lacking, detail: "1 of NVIDIA on the bus: libcuda"},
	"GPU with its driver unloaded": {card: true, files: map[string]string{"sys/bus/pci/devices/0000:02:00.0/vendor": "0x10de", "sys/bus/pci/devices/0000:02:00.0/class": "0x030200", "lib/modules/6.1.0-1-amd64/modules.dep": "updates/nvidia.ko: x\n"},
		change: withGPUs(gpus{reason: "no GPU", remedy: "nvidia-smi"}), check: "GPUs", answer: Lacking, detail: "1 of NVIDIA on the bus", fix: "modprobe nvidia"},
	"odd GPU":                          {change: withGPUs(gpus{reason: "driver and library differ", remedy: "boot", unsure: true}), check: "GPUs", answer: Unknown, detail: "differ"},
	"GPUs":                             {card: true, change: withGPUs(twoGPUs("")), check: "GPUs", answer: Yes, detail: "2 x H200 (150 GB), CUDA 12.4"},
	"GPUs in reach":                    {card: true, change: withGPUs(twoGPUs("")), check: "GPU memory over RDMA", answer: Yes, detail: "by dma-buf, with mlx5_0"},
	"GPUs out of reach":                {card: true, change: withGPUs(twoGPUs("open modules")), check: "GPU memory over RDMA", answer: Lacking, detail: "by dma-buf"},
	"GPUs, and a card without dma-buf": {card: true, change: func(h *host) { mtu(4096)(h); withGPUs(twoGPUs(""))(h) }, check: "GPU memory over RDMA", answer: Lacking, detail: "no RDMA device takes"},
	"GPUs without RDMA":                {change: func(h *host) { noDevice(h); withGPUs(twoGPUs(""))(h) }, check: "GPU memory over RDMA", answer: Unknown, detail: "no RDMA device"},
	"no measuring": {change: func(h *host) {
		h.seen = func() []telemetry.Capability {
			return []telemetry.Capability{{Name: "sockets", Answer: telemetry.No, Reason: "no", Remedy: "do"}}
		}
	}, check: "measuring sockets", answer: Lacking, detail: "no"},
	"no eBPF for this user": {change: noBPF(unix.EPERM), check: "programs", answer: Lacking, detail: "may not", fix: "setcap cap_bpf,"},
	"no eBPF in the kernel": {change: noBPF(unix.ENOSYS), check: "programs", answer: Lacking, detail: "no eBPF"},
	"odd eBPF":              {change: noBPF(unix.EINVAL), check: "programs", answer: Unknown, detail: "invalid"},
	"no BTF":                {files: without("sys/kernel/btf/vmlinux"), check: "types", answer: Lacking, detail: "BTF"},
	"no cgroup2":            {files: map[string]string{"proc/self/mounts": "x /sys/fs/cgroup cgroup rw 0 0\n"}, check: "control groups", answer: Lacking, detail: "not mounted", fix: "mount -t cgroup2 none /sys/fs/cgroup"},
	"no probes":             {files: map[string]string{"proc/sys/kernel/perf_event_paranoid": "3"}, check: "probes", answer: Lacking, detail: "is 3", fix: "sysctl -w kernel.perf_event_paranoid=-1"},
}

func verbs(v cgo.Verbs) func(h *host) {
	return func(h *host) { h.verbs = func() cgo.Verbs { return v } }
}

func noBPF(err error) func(h *host) {
	return func(h *host) { h.bpf = func() bpfAnswers { return bpfAnswers{err} } }
}

func withGPUs(g gpus) func(h *host) {
	return func(h *host) { h.cuda = func(string) gpus { return g } }
}

func twoGPUs(remedy string) gpus {
	g := gpu{name: "H200", memory: 150e9, hint: "NICs reach its memory by dma-buf", remedy: remedy}
	return gpus{list: []gpu{g, g}, version: 12040}
}

func muteFlow(h *host) { h.pfc = func(string) (pfcState, error) { return pfcState{}, unix.EOPNOTSUPP } }

func noDevice(h *host) {
	root := h.root.(fstest.MapFS)
	for name := range root {
		if strings.HasPrefix(name, classDir) {
			delete(root, name)
		}
	}
}

func TestSickHosts(t *testing.T) {
	for name, s := range sickHosts {
		t.Run(name, func(t *testing.T) {
			m := softHost()
			if s.card {
				m = cardHost()
			}
			for file, text := range s.files {
				if file = strings.ReplaceAll(file, gidBase, map[bool]string{true: strings.ReplaceAll(gidBase, "rxe0", "mlx5_0"), false: gidBase}[s.card]); text == "-" {
					delete(m, file)
				} else {
					m[file] = text
				}
			}
			h := fake(m)
			if s.change != nil {
				s.change(h)
			}
			r := h.run()
			checkWords(t, r)
			for _, c := range r.Checks {
				if c.Name != s.check {
					continue
				}
				if c.Answer != s.answer || !strings.Contains(c.Detail, s.detail) || !strings.Contains(c.Command, s.fix) || (s.fix == "") != (c.Command == "") {
					t.Errorf("%+v, want %s with %q and the command %q", c, s.answer, s.detail, s.fix)
				}
				return
			}
			t.Errorf("there is no check %q", s.check)
		})
	}
}

func TestNeeded(t *testing.T) {
	if (&Report{Checks: []Check{{Answer: Lacking}, {Answer: Needed}}}).OK() {
		t.Error("a report is fine without what is needed")
	}
	h := fake(softHost())
	noDevice(h)
	r := h.run()
	if !r.OK() {
		t.Error("a host without RDMA is not fine")
	}
	r.NeedRDMA()
	if r.OK() {
		t.Error("a host without RDMA is fine for RDMA")
	}
}

func TestPFCAnswers(t *testing.T) {
	attr := func(kind uint16, data ...byte) []byte {
		b := native.AppendUint16(nil, uint16(4+len(data)))
		b = append(native.AppendUint16(b, kind), data...)
		return append(b, make([]byte, (4-len(b)%4)%4)...)
	}
	message := func(kind uint16, payload []byte) []byte {
		b := make([]byte, unix.NLMSG_HDRLEN+len(payload))
		native.PutUint16(b[4:], kind)
		copy(b[unix.NLMSG_HDRLEN:], payload)
		return b
	}
	body := append([]byte{0, dcbCmdIEEEGet, 0, 0}, attr(dcbAttrName, []byte("d0\x00")...)...)
	good := message(unix.RTM_GETDCB, append(body, attr(dcbAttrIEEE|nestedFlag, attr(dcbIEEEPFC, 8, 1<<3|1<<5, 0, 0)...)...))
	s, err := parsePFC(good)
	if err != nil || s.String() != "priorities 3, 5" {
		t.Errorf("%v, %v", s, err)
	}
	refusal := -int32(unix.EOPNOTSUPP)
	refused := message(unix.NLMSG_ERROR, native.AppendUint32(nil, uint32(refusal)))
	if _, err := parsePFC(refused); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("refused with %v", err)
	}
	if _, err := parsePFC(message(unix.RTM_GETDCB, body)); !errors.Is(err, errNoPFC) {
		t.Errorf("without PFC: %v", err)
	}
}

func FuzzAnswers(f *testing.F) {
	f.Add([]byte(configuration(8, 16)))
	f.Add(make([]byte, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = parsePFC(b)
		_, _ = capability(b, pciCapExpress), extended(b, pciExtACS)
	})
}

// A report is read by people: no line of its own is overlong without need, and commands stand alone.
func TestTable(t *testing.T) {
	r := &Report{Checks: []Check{{Group: "RDMA", Name: "MTU", Answer: Lacking, Detail: "1024", Remedy: "larger", Command: "ip link"}, {Group: "peer", Name: "clock", Answer: Lacking, Detail: "5s", Remedy: "set it", Command: "date", Host: "far"}}}
	var b bytes.Buffer
	if err := r.Print(&b, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"RDMA\n  no       MTU    1024\n", "# ip link\n", "far # date\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
