package served

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/rpc"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/status"
	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// Where things are. Outside the lab two processes on one machine can play both, with other hosts and over TCP.
var (
	one, two, _ = strings.Cut(os.Getenv("LAB_HOSTS"), ",")
	transport   = cmp.Or(os.Getenv("LAB_TRANSPORT"), "rdma")
	etcdAddr    = one + ":2379"
	front       = "http://" + one + ":8000"
	oracle      = "http://" + one + ":8009"
)

// The files of a machine.
func file(machine int, name string) string { return fmt.Sprintf("/tmp/m%d-%s", machine+1, name) }

// admin is where a node daemon's pages are: on loopback where it has those for debugging.
func admin(machine int) string { return []string{"127.0.0.1:7002", two + ":7002"}[machine] }

// waitLong bounds every wait: emulated machines are slow.
const waitLong = 60 * time.Second

// cluster is a model served by both machines.
type cluster struct {
	t  *testing.T
	at [2]*rpc.Client
}

// serve runs a test in the first machine while the second one takes orders.
func serve(t *testing.T, drive func(*testing.T, *cluster)) {
	t.Helper()
	if os.Getenv("LAB_MACHINES") != "2" || os.Getenv("HEADRACE_BIN") == "" {
		t.Skip("needs two machines (make lab has them)")
	}
	number := 1
	if os.Getenv("LAB_VM") == "2" {
		number = 2
	}
	a := &agent{dir: t.TempDir(), parts: make(map[string]*part)}
	defer a.end()
	transporttest.MeetTwin(t, number, two+":7900", a, func(t *testing.T, at [2]*rpc.Client) {
		c := &cluster{t: t, at: at}
		defer func() {
			if t.Failed() {
				t.Logf("first machine:\n%s\nsecond machine:\n%s", order[string](c, 0, "Logs", 0), order[string](c, 1, "Logs", 0))
			}
		}()
		c.up()
		drive(t, c)
	})
}

// order has something done in a machine, 0 or 1.
func order[R any](c *cluster, machine int, method string, arg any) (r R) {
	c.t.Helper()
	if err := c.at[machine].Call("Agent."+method, arg, &r); err != nil {
		c.t.Fatalf("%s in machine %d: %v", method, machine+1, err)
	}
	return r
}

// up starts everything: registry, router, prefill worker and a reference worker in the first machine, the decode worker in
// the second, a node daemon in each.
func (c *cluster) up() {
	c.t.Helper()
	key := []byte(strings.Repeat("5a", 32) + "\n")
	for i := range 2 {
		order[bool](c, i, "Files", map[string][]byte{file(i, "key"): key})
		order[string](c, i, "Once", []string{"tinymodel", "--seed", "5", "--out", file(i, "tiny.gguf")})
	}
	c.registry()
	c.node(0)
	c.node(1)
	c.worker("prefill", 0)
	c.worker("decode", 1)
	c.start(0, "reference", "worker", "--role", "both", "--model", file(0, "tiny.gguf"), "--model-name", "tiny", "--listen", one+":8009", "--threads", "1", "--kv-memory", "64MiB")
	c.start(0, "router", "router", "--etcd", etcdAddr, "--listen", one+":8000", "--admin", "127.0.0.1:8010", "--cluster-key-file", file(0, "key"))
	c.ready()
	c.eventually("the reference worker serves", func() error { _, err := ask(oracle, request{prompt: tokens(1, 4), max: 1}); return err })
}

// registry runs an etcd in this process. It listens on loopback alone; this test's own wire is let in.
func (c *cluster) registry() {
	c.t.Helper()
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		c.t.Fatal(err)
	}
	e, err := registry.StartEmbedded(registry.EmbeddedConfig{Dir: dir, ClientAddr: "127.0.0.1:0", LogFile: filepath.Join(dir, "log"), Wait: waitLong})
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := net.Listen("tcp", etcdAddr)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := errors.Join(l.Close(), e.Close(), os.RemoveAll(dir)); err != nil {
			c.t.Error(err)
		}
	})
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go relay(in, e.Addr())
		}
	}()
}

func relay(in net.Conn, addr string) {
	defer in.Close()
	out, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer out.Close()
	go func() {
		defer in.Close()
		_, _ = io.Copy(in, out) // either end may go
	}()
	_, _ = io.Copy(out, in)
}

func (c *cluster) start(machine int, name string, args ...string) int {
	c.t.Helper()
	return order[int](c, machine, "Start", Run{Name: name, Args: args})
}

func host(machine int) string { return []string{one, two}[machine] }

func (c *cluster) node(machine int) {
	c.t.Helper()
	name := fmt.Sprintf("node-%d", machine+1)
	args := []string{
		"node", "--id", name, "--etcd", etcdAddr, "--listen", host(machine) + ":7001", "--admin", admin(machine), "--socket", file(machine, "node.sock"),
		"--transport", transport, "--cluster-key-file", file(machine, "key"), "--data-dir", file(machine, "data"),
	}
	if machine == 0 {
		args = append(args, "--debug")
	}
	c.start(machine, name, args...)
}

func (c *cluster) worker(role string, machine int) {
	c.t.Helper()
	c.start(machine, role, "worker", "--id", role, "--role", role, "--model", file(machine, "tiny.gguf"), "--model-name", "tiny", "--etcd", etcdAddr,
		"--listen", host(machine)+":8001", "--socket", file(machine, "node.sock"), "--threads", "1", "--kv-memory", "64MiB", "--data-dir", file(machine, "data"))
}

// ready waits until the router knows both workers with their daemons.
func (c *cluster) ready() {
	c.t.Helper()
	c.eventually("the router knows both workers", func() error {
		var st struct {
			Workers []struct {
				ID       string `json:"id"`
				NodeData string `json:"node_data"`
			} `json:"workers"`
		}
		if err := get("http://127.0.0.1:8010/status", &st); err != nil {
			return err
		}
		known := 0
		for _, w := range st.Workers {
			if w.NodeData != "" {
				known++
			}
		}
		if known != 2 {
			return fmt.Errorf("it has %+v", st.Workers)
		}
		return nil
	})
}

// eventually waits until a thing is so.
func (c *cluster) eventually(what string, cond func() error) time.Duration {
	c.t.Helper()
	began := time.Now()
	for {
		err := cond()
		if err == nil {
			return time.Since(began)
		}
		if time.Since(began) > waitLong {
			c.t.Fatalf("waited %v until %s: %v", waitLong, what, err)
		}
		time.Sleep(20 * time.Millisecond) // looking repeatedly with a deadline: other processes are involved
	}
}

var client = &http.Client{Timeout: waitLong, Transport: &http.Transport{DisableKeepAlives: true}}

func get(url string, into any) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

func (c *cluster) nodeStatus(machine int) (st transfer.Status) {
	c.t.Helper()
	if err := get("http://"+admin(machine)+"/status", &st); err != nil {
		c.t.Fatal(err)
	}
	return st
}

// debug asks the first node daemon for a pause point to be set, or for all to be released.
func (c *cluster) debug(path string, args url.Values) {
	c.t.Helper()
	resp, err := client.PostForm("http://"+admin(0)+"/debug/"+path, args)
	if err != nil {
		c.t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		c.t.Fatalf("%s: %s", path, resp.Status)
	}
}

// report is what `headrace status --json` says.
func (c *cluster) report() (r status.Report) {
	c.t.Helper()
	text := order[string](c, 0, "Once", []string{"status", "--etcd", etcdAddr, "--json"})
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		c.t.Fatalf("%v: %s", err, text)
	}
	return r
}

// idle waits until both workers hold no block and no request.
func (c *cluster) idle() time.Duration {
	c.t.Helper()
	return c.eventually("all blocks are back", func() error {
		for _, machine := range []int{0, 1} {
			var st status.WorkerStatus
			if err := get("http://"+host(machine)+":8001/status", &st); err != nil {
				return err
			}
			if st.Running != 0 || st.Waiting != 0 || st.BlocksLeased != 0 || st.BlocksQuarantined != 0 || st.BlocksFree != st.BlocksTotal {
				return fmt.Errorf("worker of machine %d: %+v", machine+1, st)
			}
		}
		return nil
	})
}
