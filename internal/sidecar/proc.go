package sidecar

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
)

// descendants lists a process's children, their children and so on, those that have ended and were not waited for too.
func descendants(pid int) []int {
	children := map[int][]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if p, err := strconv.Atoi(e.Name()); err == nil {
			if parent, _ := lineage(p); parent > 0 {
				children[parent] = append(children[parent], p)
			}
		}
	}
	var all []int
	for queue := []int{pid}; len(queue) > 0; queue = queue[1:] {
		all = append(all, children[queue[0]]...)
		queue = append(queue, children[queue[0]]...)
	}
	return all
}

// lineage reads a process's parent and session, the fourth and sixth field of /proc/PID/stat; 0 when it is gone.
func lineage(pid int) (parent, session int) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0
	}
	// The second field is the program's name, in parentheses and with anything in it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 4 {
		return 0, 0
	}
	parent, err1 := strconv.Atoi(string(fields[1]))
	session, err2 := strconv.Atoi(string(fields[3]))
	if err1 != nil || err2 != nil {
		return 0, 0
	}
	return parent, session
}

// carries tells whether a process was started with a variable in its environment.
func carries(pid int, variable string) bool {
	env, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	return err == nil && bytes.Contains(append([]byte{0}, env...), []byte("\x00"+variable+"\x00"))
}
