package broken

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	nearAddr, farAddr = "10.9.0.1", "10.9.0.2"
	daemonAddr        = farAddr + ":7001"
	keyFile           = "/tmp/cluster.key"

	// startDaemon is the far host as it should be. A daemon that uses soft RoCE would keep its device from being taken away.
	startDaemon = "headrace node --id far --listen " + daemonAddr + " --transport tcp --data-dir /tmp/node --cluster-key-file " + keyFile + " >/tmp/node.log 2>&1 & echo $! >/tmp/node.pid"

	// chronyc is what the machines have in place of a time daemon: it steps the clock to that of the near machine.
	chronyc = "#!/bin/sh\n[ \"$*\" = \"-a makestep\" ] && exec /bin/test-broken.test -test.run=TestMakeStep\n"
)

// order is what the near machine has the far one do: a script, or to be done with it.
type order struct {
	Script string
	Quit   bool
}

// furnishTwo makes both machines of the lab fit for it.
func furnishTwo(t *testing.T) {
	t.Helper()
	if os.Getenv("LAB_MACHINES") != "2" {
		t.Skip("needs two machines of the lab (make lab ARGS='-scenario doctor-peer')")
	}
	furnish(t)
	for file, text := range map[string]string{keyFile: strings.Repeat("a", 64) + "\n", "/run/chronyc": chronyc} {
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := script("hostname vm" + os.Getenv("LAB_VM")); err != nil {
		t.Fatal(err)
	}
}

// TestFarHost does what the near machine says.
func TestFarHost(t *testing.T) {
	furnishTwo(t)
	l, err := net.Listen("tcp", farAddr+":7300")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for {
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		var o order
		err = json.NewDecoder(conn).Decode(&o)
		answer := ""
		if err == nil && o.Script != "" {
			if err := script(o.Script); err != nil {
				answer = err.Error()
			}
		}
		if err := json.NewEncoder(conn).Encode(answer); err != nil {
			t.Error(err)
		}
		conn.Close()
		if o.Quit {
			return
		}
	}
}

// TestMakeStep is a time daemon's one step. It is run by the machine's chronyc alone.
func TestMakeStep(t *testing.T) {
	if os.Getenv("LAB_VM") != "2" {
		t.Skip("sets the clock of the lab's second machine")
	}
	conn, err := net.Dial("tcp", nearAddr+":7301")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var b [8]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		t.Fatal(err)
	}
	tv := unix.NsecToTimeval(int64(binary.LittleEndian.Uint64(b[:])))
	if err := unix.Settimeofday(&tv); err != nil {
		t.Fatal(err)
	}
}

// tellTime says what time it is here.
func tellTime(t *testing.T) {
	l, err := net.Listen("tcp", nearAddr+":7301")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], uint64(time.Now().UnixNano()))
			conn.Write(b[:])
			conn.Close()
		}
	}()
}

// there runs a script in the far machine.
func there(o order) error {
	var conn net.Conn
	var err error
	for deadline := time.Now().Add(60 * time.Second); ; {
		if conn, err = net.DialTimeout("tcp", farAddr+":7300", time.Second); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return err
		}
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Minute))
	if err := json.NewEncoder(conn).Encode(o); err != nil {
		return err
	}
	answer := ""
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return err
	}
	if answer != "" {
		return errors.New(answer)
	}
	return nil
}

// misfit is one way in which two hosts do not fit.
type misfit struct {
	name        string
	far, near   string // scripts that break it
	check, says string
	fix         string
	host        string // whose shell the command is for; "" the near one's
	fill        string // in place of FILE
	needed      bool
	mendFar     string
	mendNear    string
}

const (
	pair     = "rxe0/1 - rxe0/1 "
	dropBig  = "tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress protocol ip flower ip_proto udp dst_port 4791 action police rate 10gbit burst 10m mtu 2000 conform-exceed drop"
	dropNone = "tc qdisc del dev eth0 clsact"
)

var misfits = []misfit{
	{name: "MTU of 1500 there", far: "ip link set eth0 mtu 1500", check: pair + "MTU", says: "4096 here, 1024 there", fix: "ip link set dev eth0 mtu 4200", host: "far"},
	{name: "MTU of 1500 here", near: "ip link set eth0 mtu 1500", check: pair + "MTU", says: "1024 here, 4096 there", fix: "ip link set dev eth0 mtu 4200"},
	{name: "interfaces of unequal MTU", far: "ip link set eth0 mtu 3000", check: "interface MTU", says: "4200 here (eth0), 3000 there (eth0)", fix: "ip link set dev eth0 mtu 4200", host: "far"},
	{name: "clock off by 5 s", far: "date -s @$(($(date +%s) + 6))", check: "clocks", says: "ahead", fix: "chronyc -a makestep", host: "far"},
	{name: "large packets are dropped between", far: dropBig, check: pair + "way", says: "packets of 1024 bytes arrive, packets of 4096 do not", fix: "ip link set dev eth0 mtu 1500", needed: true,
		mendFar: dropNone, mendNear: "ip link set eth0 mtu 4200"},
	{name: "no RDMA there", far: "rdma link delete rxe0", check: "RDMA", says: "not there", fix: "headrace doctor", host: "far", needed: true},
	{name: "no daemon there", far: "kill $(cat /tmp/node.pid); for i in $(seq 300); do netstat -ltn | grep -q :7001 || break; usleep 100000; done", check: "connection", says: "refused", fix: "headrace doctor --serve " + daemonAddr, host: "far", fill: keyFile, needed: true},
}

// TestTwoHosts wants the doctor to find what does not fit between two hosts, to say on which of them what helps, and that
// it does.
func TestTwoHosts(t *testing.T) {
	furnishTwo(t)
	tellTime(t)
	defer func() {
		if err := there(order{Quit: true}); err != nil {
			t.Error(err)
		}
	}()
	if err := there(order{Script: startDaemon}); err != nil {
		t.Fatal(err)
	}
	if err := there(order{Script: "/bin/test-broken.test -test.run=TestMakeStep"}); err != nil {
		t.Fatal(err)
	}
	f := &fault{args: " --peer " + daemonAddr + " --cluster-key-file " + keyFile}
	var well *report
	for deadline := time.Now().Add(60 * time.Second); ; {
		if well = doctor(t, f, ""); well.status == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, c := range well.Checks {
		if c.Group == "peer" {
			t.Logf("%-8s %-24s %s", c.Answer, c.Name, c.Detail)
			if c.Answer != "yes" {
				t.Errorf("before anything is broken: %+v", c)
			}
		}
	}
	if well.status != 0 {
		t.Fatalf("the machines do not fit before anything is broken: status %d", well.status)
	}
	for i := range misfits {
		m := &misfits[i]
		t.Run(m.name, func(t *testing.T) { m.try(t, f, well) })
	}
}

func (m *misfit) try(t *testing.T, f *fault, well *report) {
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(there(order{Script: m.far}))
	must(script(m.near))
	defer func() {
		must(there(order{Script: m.mendFar}))
		must(script(m.mendNear))
	}()
	ill := doctor(t, f, "")
	c, found := ill.find(m.check)
	host := m.host
	if m.check == "connection" {
		host = daemonAddr // nobody said what it is called
	}
	if !found || c.Answer != "no" && c.Answer != "needed" || !strings.Contains(c.Detail, m.says) || !strings.Contains(c.Command, m.fix) || c.Host != host {
		t.Fatalf("the doctor says of it %+v (there: %v), want no with %q and a command with %q for %q", c, found, m.says, m.fix, host)
	}
	if (ill.status == 1) != m.needed {
		t.Errorf("status %d; needed for RDMA: %v", ill.status, m.needed)
	}
	fix := strings.ReplaceAll(c.Command, "FILE", m.fill)
	t.Logf("%s\n  %s# %s", c.Detail, c.Host, fix)
	switch {
	case m.host == "":
		must(script(fix))
	case strings.Contains(fix, "--serve"):
		must(there(order{Script: fix + " >/tmp/serve.log 2>&1 & for i in $(seq 300); do netstat -ltn | grep -q :7001 && break; usleep 100000; done"}))
	case fix == "headrace doctor": // which says there what to do
		must(there(order{Script: fix + ` | sed -n 's/^ *# \(.*rdma link add.*\)/\1/p' | sh -e`}))
	default:
		must(there(order{Script: fix}))
	}
	cured := doctor(t, f, "")
	if c, found := cured.find(m.check); m.check == "RDMA" && found || m.check != "RDMA" && c.Answer != "yes" {
		t.Errorf("after the cure the doctor says %+v", c)
	}
	if m.mendNear != "" {
		return
	}
	for _, was := range well.Checks {
		if c, _ := cured.find(was.Name); was.Answer == "yes" && c.Answer != "yes" {
			t.Errorf("after the cure %s is %q (%s), before the fault it was yes", was.id(), c.Answer, c.Detail)
		}
	}
}
