package doctor

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/headrace/headrace/internal/memfd"
)

func checkMemfd() Check {
	const name = "sealed memory files"
	m, err := memfd.Create("headrace-doctor", 4096)
	if err != nil {
		return Check{Name: name, Answer: Needed, Detail: err.Error(), Remedy: "engines lend their KV cache as memfd: use Linux 5.4 or newer and allow memfd_create in the seccomp profile"}
	}
	_ = m.Close()
	return yes(name, "memfd_create with seals works")
}

func checkPidfd() Check {
	const name = "process descriptors"
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return Check{Name: name, Answer: Needed, Detail: fmt.Sprintf("pidfd_open: %v", err), Remedy: "blocks of a dead daemon are freed when its process is gone: use Linux 5.4 or newer and allow pidfd_open in the seccomp profile"}
	}
	_ = unix.Close(fd)
	return yes(name, "pidfd_open works")
}

// lockedWanted is less than any KV cache worth an RDMA network.
const lockedWanted = 1 << 30

func (h *host) checkMemlock() Check {
	const name = "locked memory"
	l, err := h.rlimit(unix.RLIMIT_MEMLOCK)
	switch {
	case err != nil:
		return unknown(name, fmt.Sprintf("getrlimit: %v", err))
	case l.Cur == unix.RLIM_INFINITY:
		return yes(name, "unlimited").forRDMA()
	case h.capable(capIPCLock):
		return yes(name, fmt.Sprintf("%d KiB a process, which CAP_IPC_LOCK lifts", l.Cur>>10)).forRDMA()
	case l.Cur >= lockedWanted:
		return yes(name, fmt.Sprintf("%d MiB a process: a KV cache must fit", l.Cur>>20)).forRDMA()
	}
	return lacking(name, fmt.Sprintf("%d KiB a process", l.Cur>>10),
		"RDMA registers whole KV caches: raise the limit as root before headrace is started; LimitMEMLOCK=infinity in its unit, --ulimit memlock=-1 or --cap-add IPC_LOCK for a container",
		"ulimit -l unlimited").forRDMA()
}

// filesWanted is room for a thousand channels of a few lanes and the engines' regions.
const filesWanted = 8192

func (h *host) checkFiles() Check {
	const name = "open files"
	l, err := h.rlimit(unix.RLIMIT_NOFILE)
	if err != nil {
		return unknown(name, fmt.Sprintf("getrlimit: %v", err))
	}
	detail := fmt.Sprintf("up to %d a process", l.Max) // the soft limit is raised to it at the start of every part
	if l.Max >= filesWanted {
		return yes(name, detail)
	}
	return lacking(name, detail, "each channel takes a file a lane, each client one at the router: raise the limit as root before headrace is started, or LimitNOFILE=65536 in its unit",
		"ulimit -n 65536")
}
