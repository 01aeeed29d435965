// Package hostmem knows how much memory this process may use, so that what cannot fit is refused at the start. Lent memory is
// charged page by page as it is touched: without the look ahead a cache that is too large ends in a kill by the kernel,
// under load.
package hostmem

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/dustin/go-humanize"
)

// Limit is the most that this process may use, in bytes, and what sets it. 0: not known.
func Limit() (limit uint64, source string) {
	if n, err := memlimit.FromSystem(); err == nil && n > 0 {
		limit, source = n, "this machine's memory"
	}
	if n, err := memlimit.FromCgroup(); err == nil && n > 0 && (limit == 0 || n < limit) {
		limit, source = n, "the memory limit of its control group"
	}
	return limit, source
}

// Check says why need bytes cannot fit, naming what for and the option that helps. What fits in the limit may still be
// taken by others.
func Check(what string, need uint64, option string) error {
	limit, source := Limit()
	return check(what, need, option, limit, source)
}

func check(what string, need uint64, option string, limit uint64, source string) error {
	if limit == 0 || need <= limit {
		return nil
	}
	return fmt.Errorf("%s of %s does not fit: %s is %s; give a smaller %s", what, humanize.IBytes(need), source, humanize.IBytes(limit), option)
}

// Available is what the kernel thinks can be had without swapping, in bytes. 0: not known.
func Available() uint64 {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "MemAvailable:" {
			kb, err := strconv.ParseUint(fields[1], 10, 53)
			if err != nil {
				return 0
			}
			return kb << 10
		}
	}
	return 0
}
