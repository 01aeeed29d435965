package sidecar

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
)

const (
	portMin   = 10240 // below it are services that people know by number
	portTries = 1000
)

// reserved are the abstract unix sockets that keep this process's ports from its like. The kernel closes them with it.
var reserved struct {
	sync.Mutex
	held []net.Listener
}

// FreePort is one that nobody listens on, and that neither an outgoing connection nor another sidecar of this host takes
// until the engine listens there, which may be a minute later.
func FreePort(host string) (int, error) {
	return freePort(host, portRange())
}

// span is a range of ports, both ends among them.
type span struct{ first, last int }

func freePort(host string, spans []span) (int, error) {
	count := 0
	for _, s := range spans {
		count += s.last - s.first + 1
	}
	var last error
	for range portTries {
		n := rand.IntN(count)
		port := 0
		for _, s := range spans {
			if port = s.first + n; port <= s.last {
				break
			}
			n -= s.last - s.first + 1
		}
		// Its name is seen where the port is: in this network namespace.
		claim, err := net.Listen("unix", "@headrace-port-"+strconv.Itoa(port))
		if err != nil {
			last = err
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			last = errors.Join(err, claim.Close())
			continue
		}
		reserved.Lock()
		reserved.held = append(reserved.held, claim)
		reserved.Unlock()
		return port, l.Close()
	}
	return 0, fmt.Errorf("find a free port on %s: %w", host, last)
}

// portRange is where the kernel takes no ports from for outgoing connections; everything where that leaves too little.
func portRange() []span {
	first, last := 32768, 60999
	if data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(data), &first, &last)
	}
	return outside(first, last)
}

func outside(first, last int) []span {
	var spans []span
	if first-portMin >= 1000 {
		spans = append(spans, span{portMin, min(first-1, 65535)})
	}
	if 65535-last >= 1000 {
		spans = append(spans, span{max(last+1, portMin), 65535})
	}
	if spans == nil {
		spans = []span{{portMin, 65535}}
	}
	return spans
}
