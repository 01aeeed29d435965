// Package doctor looks at what this build and this host can do, and says what to do about what they cannot.
// Every answer is one of three: yes, no with a reason, or not known.
package doctor

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/cgo"
	"github.com/headrace/headrace/internal/memfd"
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
	Name   string `json:"name"`
	Answer Answer `json:"answer"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// Report is all checks.
type Report struct {
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

// Run makes all checks of this host, whose /proc and /sys are below root ("/" outside tests).
func Run(root fs.FS) *Report {
	return &Report{Checks: []Check{
		checkCPU(root), checkMemfd(), checkPidfd(), checkVerbs(cgo.Probe()), checkMemlock(), checkFiles(), checkHugepages(root),
		checkSendBuffer(root),
	}}
}

func checkCPU(root fs.FS) Check {
	c := Check{Name: "CPU", Answer: Yes, Detail: fmt.Sprintf("%d cores, %s", runtime.NumCPU(), runtime.GOARCH)}
	flags := procField(root, "proc/cpuinfo", "flags")
	switch {
	case runtime.GOARCH != "amd64" || flags == "":
		return c
	case strings.Contains(flags, " avx2 ") && strings.Contains(flags, " fma "):
		c.Detail += ", AVX2"
	default:
		c.Answer, c.Remedy = Lacking, "the reference engine uses its slow Go kernels here; use a CPU with AVX2 and FMA"
	}
	if strings.Contains(flags, " avx512f ") {
		c.Detail += ", AVX-512"
	}
	return c
}

func checkMemfd() Check {
	c := Check{Name: "sealed memory files", Answer: Yes, Detail: "memfd_create with seals works"}
	m, err := memfd.Create("headrace-doctor", 4096)
	if err != nil {
		c.Answer, c.Detail, c.Remedy = Needed, err.Error(), "engines lend their KV cache as memfd: use Linux 5.4 or newer and allow memfd_create in the seccomp profile"
		return c
	}
	_ = m.Close()
	return c
}

func checkPidfd() Check {
	c := Check{Name: "process descriptors", Answer: Yes, Detail: "pidfd_open works"}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		c.Answer, c.Detail, c.Remedy = Needed, fmt.Sprintf("pidfd_open: %v", err), "blocks of a dead daemon are freed when its process is gone: use Linux 5.4 or newer and allow pidfd_open in the seccomp profile"
		return c
	}
	_ = unix.Close(fd)
	return c
}

func checkVerbs(v cgo.Verbs) Check {
	c := Check{Name: "RDMA verbs", Answer: Yes, Detail: strings.Join(v.Devices, " "), Remedy: v.Remedy()}
	if v.Err() != nil {
		c.Answer, c.Detail = Lacking, v.Reason()+"; transfers use TCP and shared memory"
	}
	if v.State == cgo.Failed {
		c.Answer = Unknown
	}
	return c
}

func checkMemlock() Check {
	c := Check{Name: "locked memory", Answer: Yes}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		c.Answer, c.Detail = Unknown, fmt.Sprintf("getrlimit: %v", err)
		return c
	}
	if l.Cur == unix.RLIM_INFINITY {
		c.Detail = "unlimited"
		return c
	}
	c.Detail = fmt.Sprintf("%d KiB a process", l.Cur>>10)
	if l.Cur < 1<<30 {
		c.Answer, c.Remedy = Lacking, "RDMA registers whole KV caches: ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or CAP_IPC_LOCK"
	}
	return c
}

// filesWanted is room for a thousand channels of a few lanes and the engines' regions.
const filesWanted = 8192

func checkFiles() Check {
	c := Check{Name: "open files", Answer: Yes}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		c.Answer, c.Detail = Unknown, fmt.Sprintf("getrlimit: %v", err)
		return c
	}
	c.Detail = fmt.Sprintf("up to %d a process", l.Max) // the soft limit is raised to it at the start of every part
	if l.Max < filesWanted {
		c.Answer, c.Remedy = Lacking, "each channel takes a file a lane, each client one at the router: ulimit -Hn 65536, or LimitNOFILE=65536 in the unit"
	}
	return c
}

func checkHugepages(root fs.FS) Check {
	c := Check{Name: "huge pages", Answer: Yes}
	total, err := strconv.Atoi(procField(root, "proc/meminfo", "HugePages_Total"))
	thp, thpErr := fs.ReadFile(root, "sys/kernel/mm/transparent_hugepage/enabled")
	switch {
	case err != nil:
		c.Answer, c.Detail = Unknown, "/proc/meminfo has no HugePages_Total"
	case total > 0:
		c.Detail = fmt.Sprintf("%d reserved", total)
	case thpErr == nil && !strings.Contains(string(thp), "[never]"):
		c.Detail = "none reserved; transparent ones are on"
	default:
		c.Answer, c.Detail, c.Remedy = Lacking, "none", "sysctl vm.nr_hugepages=512, or turn transparent huge pages on: fewer page faults for large KV caches"
	}
	return c
}

// socketBufferWanted keeps a lane of 25 Gbit/s busy over half a millisecond.
const socketBufferWanted = 1 << 20

func checkSendBuffer(root fs.FS) Check {
	c := Check{Name: "TCP buffers", Answer: Yes}
	fields := strings.Fields(readText(root, "proc/sys/net/ipv4/tcp_wmem"))
	if len(fields) != 3 {
		c.Answer, c.Detail = Unknown, "net.ipv4.tcp_wmem cannot be read"
		return c
	}
	limit, err := strconv.Atoi(fields[2])
	if err != nil {
		c.Answer, c.Detail = Unknown, "net.ipv4.tcp_wmem is "+strings.Join(fields, " ")
		return c
	}
	c.Detail = fmt.Sprintf("up to %d KiB a stream", limit>>10)
	if limit < socketBufferWanted {
		c.Answer, c.Remedy = Lacking, "sysctl net.ipv4.tcp_wmem='4096 65536 16777216' net.ipv4.tcp_rmem='4096 131072 16777216'"
	}
	return c
}

func readText(root fs.FS, path string) string {
	data, err := fs.ReadFile(root, path)
	if err != nil {
		return ""
	}
	return string(data)
}

// procField returns a "name : value" line's value, with a space at both ends, or "".
func procField(root fs.FS, path, name string) string {
	s := bufio.NewScanner(strings.NewReader(readText(root, path)))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		key, value, ok := strings.Cut(s.Text(), ":")
		if ok && strings.TrimSpace(key) == name {
			if value = strings.TrimSpace(value); strings.Contains(value, " ") {
				return " " + value + " "
			}
			return value
		}
	}
	return ""
}

// Print writes the report: a table with remedies, or with asJSON the document.
func (r *Report) Print(w io.Writer, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range r.Checks {
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.Answer, c.Name, c.Detail)
		if c.Remedy != "" {
			fmt.Fprintf(t, "\t\t  to change it: %s\n", c.Remedy)
		}
	}
	return t.Flush()
}
