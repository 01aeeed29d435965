package tracebench

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// cpu is processors' time, in seconds so far or, of a time between, in processors that were busy.
type cpu struct {
	at                       time.Time
	clients, router, engines float64
}

// used is what this process, with the clients in it, and its children have used so far; the last of these is the router.
func used(all []*process) cpu {
	c := cpu{at: time.Now(), clients: seconds(0)}
	for i, p := range all {
		if s := seconds(p.Group()); i+1 < len(all) {
			c.engines += s
		} else {
			c.router += s
		}
	}
	return c
}

// seconds is what a process has used, 0 for this one, by its CPU clock: see clock_getcpuclockid(3).
func seconds(pid int) float64 {
	const sched = 2
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0
	}
	return float64(t.Nano()) / 1e9
}

func (c cpu) since(b *cpu) cpu {
	s := c.at.Sub(b.at).Seconds()
	return cpu{at: c.at, clients: (c.clients - b.clients) / s, router: (c.router - b.router) / s, engines: (c.engines - b.engines) / s}
}

func (c *cpu) words() string {
	return fmt.Sprintf("clients %.2f, router %.2f, engines %.2f", c.clients, c.router, c.engines)
}
