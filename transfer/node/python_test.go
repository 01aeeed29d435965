package node_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/ticket"
)

// A client in another language, written from docs/protocol.md, moves a block of two tensor-parallel ranks to one,
// by ring and by message, over one connection and over one a rank.
func TestPythonClient(t *testing.T) {
	for _, form := range []string{"ring", "messages", "members"} {
		t.Run(form, func(t *testing.T) { testPythonClient(t, form) })
	}
}

func testPythonClient(t *testing.T, form string) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	r := startNode(t, nodeConfig{NodeID: "node-a", Transport: "tcp"})
	s := startNode(t, nodeConfig{NodeID: "node-b", Transport: "tcp"})
	l := transfer.Layout{DType: transfer.F32, Layers: 1, Blocks: 4, BlockTokens: 16, Planes: 1, Heads: 2, HeadsTotal: 2, HeadBytes: 256, TPSize: 1,
		LayerStride: 4 * 8192, BlockStride: 8192, PlaneStride: 8192, TokenStride: 512, HeadStride: 256}
	d := newEngine(t, s.Socket, "d", l)
	tk := ticket.Ticket{Nonce: ticket.NewNonce(), PNode: "node-a", DNode: "node-b", PEngine: "python", DEngine: "d", Deadline: time.Now().Add(time.Minute)}
	raw := ticket.Mint(clusterKey, tk)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "testdata/client.py", r.Socket, "python", d.Info().DataAddr, hex.EncodeToString(raw), form)
	type result struct {
		out []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		out, err := cmd.CombinedOutput()
		done <- result{out, err}
	}()
	presented := func() transfer.Event {
		select {
		case ev := <-d.of(tk.Nonce):
			return ev
		case res := <-done:
			t.Fatalf("client ended early: %v\n%s", res.err, res.out)
			return transfer.Event{}
		}
	}()
	if presented.Kind != transfer.EventPresented || string(presented.Meta) != "from python" || presented.PEngine != "python" {
		t.Errorf("presented: %+v", presented)
	}
	if _, err := d.Bind(t.Context(), transfer.BindReq{Ticket: raw, Regions: []transfer.RegionID{d.region}, Blocks: []uint32{3}}); err != nil {
		t.Fatal(err)
	}
	if ev := d.until(tk.Nonce, transfer.EventSettled); string(ev.Record) != "record of python" {
		t.Errorf("record %q", ev.Record)
	}
	for i, b := range block(d, 0, 3) { // of each token the head of rank 0, then that of rank 1
		token, rank, at := i/512, i/256%2, i%256
		if b != byte((token*256+at)*7+3+rank) {
			t.Fatalf("byte %d of the block is %#x", i, b)
		}
	}
	res := <-done
	var said struct {
		Node    string
		Seq     uint64
		Refusal string
	}
	if err := json.Unmarshal(res.out, &said); res.err != nil || err != nil || said.Node != "node-a" || said.Seq != 41 || !strings.Contains(said.Refusal, "code 9: ") {
		t.Errorf("client: %v, %v\n%s", res.err, err, res.out)
	}
}
