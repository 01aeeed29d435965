package telemetry

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Answer is yes, no or unknown.
type Answer string

// The answers. Only the first two are conclusive.
const (
	Yes     Answer = "yes"
	No      Answer = "no"
	Unknown Answer = "unknown"
)

// Capability is one kind of measurement by eBPF: whether it is possible here, why not, and what to do about it.
type Capability struct {
	Name   string `json:"name"` // sockets, packets or posts
	Answer Answer `json:"answer"`
	Reason string `json:"reason"`
	Remedy string `json:"remedy,omitempty"`
}

// Probe tries each program: it loads it and attaches it where that touches nobody. Nothing stays attached.
func Probe() []Capability {
	var out []Capability
	for _, p := range []struct {
		name string
		try  func() error
	}{
		{"sockets", func() error { return closed(newSockets("")) }},
		{"packets", func() error { return closed(newPackets()) }},
		{"posts", probePosts},
	} {
		out = append(out, judge(p.name, p.try()))
	}
	return out
}

func closed[T interface{ Close() error }](v T, err error) error {
	if err != nil {
		return err
	}
	return v.Close()
}

const (
	capsRemedy = "give the daemon CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN (systemd: AmbientCapabilities=; setcap cap_bpf,cap_perfmon,cap_net_admin=ep), " +
		"and allow bpf(2) in its seccomp profile"
	kernelRemedy = "run a kernel of 5.10 or newer with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF, CONFIG_NET_CLS_ACT, CONFIG_UPROBES and CONFIG_DEBUG_INFO_BTF"
)

// judge makes an answer of what an attempt came to.
func judge(name string, err error) Capability {
	c := Capability{Name: name, Answer: No}
	switch {
	case err == nil:
		c.Answer, c.Reason = Yes, "eBPF programs can be attached"
		return c
	case errors.Is(err, errNothing):
		c.Answer = Unknown
	case errors.Is(err, errNoCgroup):
		c.Remedy = "mount it (mount -t cgroup2 none /sys/fs/cgroup), or boot with systemd.unified_cgroup_hierarchy=1"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		c.Remedy = capsRemedy
		if name == "posts" {
			c.Remedy += "; for probes a kernel older than 6.6 asks for CAP_SYS_ADMIN as well"
		}
		if lockdown() {
			c.Remedy += "; the kernel is locked down, which forbids reading memory: boot without lockdown=confidentiality"
		}
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS), errors.Is(err, os.ErrNotExist):
		c.Remedy = kernelRemedy
	default:
		c.Answer = Unknown
	}
	c.Reason = fmt.Sprintf("no eBPF for %s: %v", name, err)
	return c
}

// lockdown says whether the kernel is locked down so far that programs cannot read memory.
func lockdown() bool {
	b, err := os.ReadFile("/sys/kernel/security/lockdown")
	return err == nil && strings.Contains(string(b), "[confidentiality]")
}
