package node_test

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A daemon at its limit of open files neither spins nor dies: what is connected goes on, and newcomers are served as
// soon as there is room.
func TestLimitOfOpenFiles(t *testing.T) {
	r, proc := startNodeProcess(t, nodeConfig{NodeID: "node-a", Transport: "tcp", Dir: t.TempDir()})
	pid := proc.cmd.Process.Pid
	p, d := newEngine(t, r.Socket, "p", wideLayout()), newEngine(t, r.Socket, "d", wideLayout())
	pattern(p, 3)
	works(t, p, d)
	var old unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old); err != nil {
		t.Fatal(err)
	}
	limit := &unix.Rlimit{Cur: uint64(openFilesOf(t, pid) + 3), Max: old.Max}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, limit, nil); err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	for range 40 { // to both listeners; the rest waits in their backlogs
		for network, addr := range map[string]string{"unix": r.Socket, "tcp": r.DataAddr} {
			c, err := net.DialTimeout(network, addr, 5*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
	}
	eventually(t, "the daemon is at its limit", func() bool { return openFilesOf(t, pid) >= int(limit.Cur) })
	before := cpuTicks(t, pid)
	works(t, p, d)                                    // over the channel that is open
	<-time.After(500 * time.Millisecond)              // what is measured needs time to be spent
	if used := cpuTicks(t, pid) - before; used > 25 { // hundredths of a second; a loop that spins takes 50 on each of its cores
		t.Errorf("the daemon took %d ticks of processor time in half a second at its limit", used)
	}
	for _, c := range conns {
		_ = c.Close()
	}
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil); err != nil {
		t.Fatal(err)
	}
	works(t, p, d)
	fresh := newEngine(t, r.Socket, "fresh", testLayout())
	_ = fresh.Close()
}

func cpuTicks(t *testing.T, pid int) (ticks int) {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
	var user, system int
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return user + system
}
