package routerbench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// usage is what a contestant's processes have used so far.
type usage struct {
	seconds  float64 // of processors
	switches int     // of threads that had to wait
}

// usageOf sums over the threads of all processes of a process group. What cannot be read counts nothing.
func usageOf(group int) (u usage) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		// Behind the name, which is in parentheses and may hold anything: state, parent, group.
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(fields) < 3 || fields[2] != strconv.Itoa(group) {
			continue
		}
		tasks, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "task", "*"))
		for _, task := range tasks {
			u.add(task)
		}
	}
	return u
}

func (u *usage) add(task string) {
	var ns int64
	if b, err := os.ReadFile(filepath.Join(task, "schedstat")); err == nil {
		if _, err := fmt.Sscan(string(b), &ns); err == nil {
			u.seconds += float64(ns) / 1e9
		}
	}
	b, _ := os.ReadFile(filepath.Join(task, "status"))
	if _, rest, ok := bytes.Cut(b, []byte("\nvoluntary_ctxt_switches:")); ok {
		line, _, _ := bytes.Cut(rest, []byte("\n"))
		n, _ := strconv.Atoi(string(bytes.TrimSpace(line)))
		u.switches += n
	}
}
