package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func adjtimex() (t unix.Timex, state int, err error) {
	state, err = unix.Adjtimex(&t)
	return t, state, err
}

// clockErrorMax is what tickets' deadlines bear: hosts agree to within a second or so.
const clockErrorMax = 500 * time.Millisecond

// checkClock asks the kernel whether somebody keeps its clock right.
func (h *host) checkClock() Check {
	const name = "clock"
	t, state, err := h.adjust()
	if err != nil {
		return unknown(name, "adjtimex: "+errno(err))
	}
	within := time.Duration(t.Maxerror) * time.Microsecond
	remedy, command := "tickets carry deadlines by the clock, so hosts must agree on the time: let a time daemon keep it", h.syncCommand()
	switch {
	case state == unix.TIME_ERROR || t.Status&unix.STA_UNSYNC != 0:
		return lacking(name, "not synchronised, as far as the kernel knows", remedy, command)
	case within > clockErrorMax:
		return lacking(name, fmt.Sprintf("synchronised, but only to within %v", within), remedy, command)
	}
	return yes(name, fmt.Sprintf("synchronised to within %v", within))
}

func (h *host) syncCommand() string {
	switch {
	case h.find("chronyc"):
		return "chronyc -a makestep"
	case h.find("timedatectl"):
		return "timedatectl set-ntp true"
	}
	return h.install("chrony", "chrony") + " && chronyc -a makestep"
}

// goodSources of the clock are read without leaving user space, in the order of preference.
var goodSources = []string{"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen", "pvclock"}

func (h *host) checkClockSource() Check {
	const name, dir = "clock source", "sys/devices/system/clocksource/clocksource0/"
	source, available := h.text(dir+"current_clocksource"), h.text(dir+"available_clocksource")
	switch {
	case source == "":
		return unknown(name, "the kernel does not say")
	case slices.Contains(goodSources, source):
		return yes(name, source)
	}
	i := slices.IndexFunc(goodSources, func(s string) bool { return hasWord(available, s) })
	if i < 0 {
		return lacking(name, source+", which is slow to read; there is no better one ("+strings.TrimSpace(available)+")", "each completion is timed: latency rises; see the kernel's log for why it does not use the processor's counter", "")
	}
	return lacking(name, source+", which is slow to read", "each completion is timed: latency rises", "echo "+goodSources[i]+" > /"+dir+"current_clocksource")
}
