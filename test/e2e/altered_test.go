package e2e

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/transporttest"
)

// TestAlteredOnTheWire puts a network that alters bytes between prefill and decode: every answer is that of the undisturbed
// engine, and the altered pieces were seen and sent again.
func TestAlteredOnTheWire(t *testing.T) {
	needAll(t)
	model := smolModel(t)
	o := oracleFor(t, model)
	proxy := transporttest.NewProxy(t)
	t.Cleanup(proxy.Close)
	config := filepath.Join(t.TempDir(), "headrace.yaml")
	// Four lanes: two of them die in the last scene, and the channel must not.
	doc := fmt.Sprintf("node:\n  checksum: always\n  lanes: 4\n  advertise: %s\n", proxy.Addr)
	if err := os.WriteFile(config, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	c := start(t, options{model: model, nodes: 2, args: []string{"--config", config}})
	t.Cleanup(proxy.Close) // before the cluster's end is looked at
	decode := c.nodeOf(c.decode())
	proxy.Target(dataListener(t, decode.PID, decode.Admin))
	text := "Tell the story of the mill again, from the weir to the wheel: " + strings.Repeat("the gate opens and the water comes. ", 12)
	for i, parts := range [][]transporttest.Part{
		nil, {transporttest.Payload}, {transporttest.Payload, transporttest.Payload, transporttest.Payload}, {transporttest.Header}, {transporttest.Trailer},
		{transporttest.Payload, transporttest.Header, transporttest.Payload, transporttest.Trailer},
	} {
		r := sampled(request{Model: c.prefill().Model, Chat: fmt.Sprintf("Number %d. %s", i, text), MaxTokens: 16, Stream: i%2 == 0}, i)
		want := o.want(t, r)
		before, _ := c.moved()
		proxy.Alter(parts...)
		a := ask(c.url(), r)
		mustEqual(t, a, want, fmt.Sprintf("with %d frames altered", len(parts)))
		c.blocksBack(waitShort, "after an answer")
		if after, _ := c.moved(); after == before {
			t.Errorf("with %d frames altered: no lease settled, the request was not disaggregated", len(parts))
		}
	}
	var all transfer.Totals
	for _, n := range c.view().Nodes {
		st, err := node{n}.status()
		if err != nil {
			t.Fatal(err)
		}
		all.PiecesVerified += st.Totals.PiecesVerified
		all.PiecesAltered += st.Totals.PiecesAltered
		all.PiecesResent += st.Totals.PiecesResent
	}
	// Of six altered payloads, two went together with a header and a trailer: what their lanes took along was sent again anyway.
	const altered, sure, payloads = 10, 4, 6
	if n := proxy.Altered(); n != altered || all.PiecesAltered < sure || all.PiecesAltered > payloads || all.PiecesResent < sure || all.PiecesVerified <= payloads {
		t.Errorf("%d frames were altered, want %d; %d pieces verified, %d found altered, %d sent again, want %d to %d", n, altered,
			all.PiecesVerified, all.PiecesAltered, all.PiecesResent, sure, payloads)
	}
	t.Logf("6 answers are equal with %d frames altered on the wire; %d pieces verified, %d found altered and sent again", altered, all.PiecesVerified, all.PiecesAltered)
}

// dataListener finds the address on which a daemon really takes data connections: it advertises another.
func dataListener(t *testing.T, pid int, admin string) string {
	t.Helper()
	inodes := map[string]bool{}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if link, err := os.Readlink(fd); err == nil && strings.HasPrefix(link, "socket:[") {
			inodes[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
		}
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/net/tcp", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const listening, state, inode = "0A", 3, 9
	for lines := bufio.NewScanner(f); lines.Scan(); {
		x := strings.Fields(lines.Text())
		if len(x) <= inode || x[state] != listening || !inodes[x[inode]] {
			continue
		}
		_, hex, _ := strings.Cut(x[1], ":")
		port, err := strconv.ParseUint(hex, 16, 16)
		if err != nil {
			t.Fatal(err)
		}
		if addr := net.JoinHostPort("127.0.0.1", strconv.FormatUint(port, 10)); addr != admin {
			return addr
		}
	}
	t.Fatalf("process %d listens on nothing but %s", pid, admin)
	return ""
}
