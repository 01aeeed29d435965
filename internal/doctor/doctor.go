// Package doctor looks at what this build and this host can do, and at what two hosts can do together, and says what to do
// about what they cannot. Every answer is one of three: yes, no with a reason, or not known. What the kernel says is read from
// its files below a root that tests replace; nothing is changed but by examinations that a peer allowed.
package doctor

import (
	"io/fs"
)

// Answer of a check.
type Answer string

// The answers. Lacking is not an error: Headrace runs without, slower or with less.
const (
	Yes     Answer = "yes"
	Lacking Answer = "no"
	Unknown Answer = "unknown"
	Needed  Answer = "needed" // and missing: Headrace does not run without
)

// Check is one line of the report.
type Check struct {
	Group  string `json:"group"`
	Name   string `json:"name"`
	Answer Answer `json:"answer"`
	Detail string `json:"detail"`
	// Remedy says in words what to do, and Command what does it in root's shell (for limits: in the shell that starts Headrace).
	// Words in capitals in a command are to be filled in. With a peer, Host says where; "" is this host.
	Remedy  string `json:"remedy,omitempty"`
	Command string `json:"command,omitempty"`
	Host    string `json:"host,omitempty"`

	rdma bool // RDMA does not work without it
}

// The groups, in the order of the report.
const (
	groupHost   = "host"
	groupMemory = "memory"
	groupTCP    = "TCP"
	groupRDMA   = "RDMA"
	groupGPU    = "GPU"
	groupBPF    = "eBPF"
)

func yes(name, detail string) Check { return Check{Name: name, Answer: Yes, Detail: detail} }
func unknown(name, detail string) Check {
	return Check{Name: name, Answer: Unknown, Detail: detail}
}

func lacking(name, detail, remedy, command string) Check {
	return Check{Name: name, Answer: Lacking, Detail: detail, Remedy: remedy, Command: command}
}

// forRDMA marks what RDMA does not work without.
func (c Check) forRDMA() Check {
	c.rdma = true
	return c
}

// group puts checks into a group.
func group(name string, checks ...Check) []Check {
	for i := range checks {
		checks[i].Group = name
	}
	return checks
}

// Report is all checks.
type Report struct {
	Host   string  `json:"host,omitempty"`
	Build  string  `json:"build,omitempty"`
	Peer   string  `json:"peer,omitempty"`
	Checks []Check `json:"checks"`
}

// OK tells whether nothing that is needed is missing.
func (r *Report) OK() bool {
	for _, c := range r.Checks {
		if c.Answer == Needed {
			return false
		}
	}
	return true
}

// NeedRDMA is for a host that is to use RDMA: what that lacks is needed then.
func (r *Report) NeedRDMA() {
	for i := range r.Checks {
		if c := &r.Checks[i]; c.rdma && c.Answer == Lacking {
			c.Answer = Needed
		}
	}
}

// Run makes all checks of this host, whose /proc and /sys are below root ("/" outside tests).
func Run(root fs.FS) *Report { return here(root).run() }

func (h *host) run() *Report {
	r := &Report{}
	add := func(name string, checks ...Check) { r.Checks = append(r.Checks, group(name, checks...)...) }
	add(groupHost, h.checkCPU(), h.checkGovernor(), checkMemfd(), checkPidfd(), h.checkFiles(), h.checkClock(), h.checkClockSource())
	add(groupMemory, h.checkMemlock(), h.checkHugepages())
	add(groupTCP, h.checkBuffers())
	devices := h.devices()
	add(groupRDMA, h.checkVerbs(devices)...)
	for _, d := range devices {
		add(groupRDMA, h.checkDevice(d)...)
	}
	add(groupRDMA, h.checkVFs()...)
	add(groupGPU, h.checkGPUs(devices)...)
	add(groupBPF, h.checkBPF()...)
	return r
}
