package doctor

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/transfer/telemetry"
)

// bpfAnswers is what the kernel said to a program of two instructions.
type bpfAnswers struct{ load error }

// askBPF loads the smallest program of the kind that telemetry attaches to sockets.
func askBPF() bpfAnswers {
	const progLoad, sockOps = 5, 13
	code := [2]uint64{0x1_0000_00b7, 0x95} // r0 = 1; exit
	license := [4]byte{'G', 'P', 'L'}
	attr := struct {
		kind, count    uint32
		code, license  unsafe.Pointer
		level, size    uint32
		log            uint64
		version, flags uint32
	}{kind: sockOps, count: uint32(len(code)), code: unsafe.Pointer(&code), license: unsafe.Pointer(&license)}
	fd, _, e := unix.Syscall(unix.SYS_BPF, progLoad, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if e != 0 {
		return bpfAnswers{load: e}
	}
	return bpfAnswers{load: unix.Close(int(fd))}
}

// checkBPF looks at what telemetry by eBPF takes. Without, the same figures come from TCP_INFO and the devices' counters.
func (h *host) checkBPF() []Check {
	checks := []Check{h.checkPrograms(), h.checkTypes(), h.checkControlGroups(), h.checkProbes()}
	for _, c := range checks {
		if c.Answer == Lacking {
			return checks // the attempts would say the same in other words
		}
	}
	return append(checks, h.checkMeasurements()...)
}

// checkMeasurements tries what the daemon would attach, and takes it away again.
func (h *host) checkMeasurements() (checks []Check) {
	words := map[telemetry.Answer]Answer{telemetry.Yes: Yes, telemetry.No: Lacking}
	for _, c := range h.seen() {
		answer, known := words[c.Answer]
		if !known {
			answer = Unknown
		}
		checks = append(checks, Check{Name: "measuring " + c.Name, Answer: answer, Detail: c.Reason, Remedy: c.Remedy})
	}
	return checks
}

const withoutBPF = "; without, telemetry reads TCP_INFO and the devices' counters"

func (h *host) checkPrograms() Check {
	const name = "programs"
	err := h.bpf().load
	switch {
	case err == nil:
		return yes(name, "may be loaded")
	case errors.Is(err, unix.ENOSYS):
		return lacking(name, "this kernel has no eBPF", "use a kernel with CONFIG_BPF_SYSCALL"+withoutBPF, "")
	case errors.Is(err, unix.EPERM) && h.capable(capBPF, capSysAdmin) && h.capable(capNetAdmin, capSysAdmin):
		return lacking(name, "may not be loaded, though this process has the capabilities: a seccomp profile or lockdown forbids it", "allow bpf in the container's profile (--security-opt seccomp=...)"+withoutBPF, "")
	case errors.Is(err, unix.EPERM):
		return lacking(name, "this user may not load any", "run the daemon as root, or give its unit AmbientCapabilities=CAP_BPF CAP_PERFMON CAP_NET_ADMIN, or the program itself"+withoutBPF,
			"setcap cap_bpf,cap_perfmon,cap_net_admin,cap_ipc_lock+ep "+h.self())
	}
	return unknown(name, fmt.Sprintf("bpf: %v", err))
}

func (h *host) checkTypes() Check {
	const name = "types"
	if h.exists("sys/kernel/btf/vmlinux") {
		return yes(name, "the kernel describes its own (BTF)")
	}
	return lacking(name, "the kernel does not describe its own (BTF)", "use a kernel with CONFIG_DEBUG_INFO_BTF, as the distributions' are"+withoutBPF, "")
}

func (h *host) checkControlGroups() Check {
	const name = "control groups"
	for line := range strings.Lines(h.text("proc/self/mounts")) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return yes(name, "version 2, at "+f[1])
		}
	}
	return lacking(name, "version 2 is not mounted", "programs that look at sockets are attached to its root"+withoutBPF, "mkdir -p /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup")
}

// checkProbes is about probes at functions of a program.
func (h *host) checkProbes() Check {
	const name = "probes"
	paranoid, known := h.number("proc/sys/kernel/perf_event_paranoid")
	switch {
	case !h.exists("sys/bus/event_source/devices/uprobe"):
		return lacking(name, "this kernel has no uprobes", "use a kernel with CONFIG_UPROBES"+withoutBPF, "")
	case h.capable(capPerfmon, capSysAdmin):
		return yes(name, "this process may set them")
	case known && paranoid < 0:
		return yes(name, "anybody may set them")
	}
	return lacking(name, fmt.Sprintf("this user may not set any (kernel.perf_event_paranoid is %d)", paranoid), "run the daemon as root or with CAP_PERFMON, or let anybody"+withoutBPF, "sysctl -w kernel.perf_event_paranoid=-1")
}
