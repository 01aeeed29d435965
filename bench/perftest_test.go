package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/headrace/headrace/transfer"
)

const bandwidthText = `---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 2445.404000 != 2450.000000. CPU Frequency is not max.
 65536      1000             68.10              67.25  		     0.001076
---------------------------------------------------------------------------------------
`

func TestParseBandwidth(t *testing.T) {
	if v, err := parseBandwidth(bandwidthText, 65536); err != nil || v != 67.25*mib {
		t.Errorf("%v, %v", v, err)
	}
	for name, text := range map[string]string{"empty": "", "other size": strings.ReplaceAll(bandwidthText, "65536", "4096"), "nothing moved": strings.ReplaceAll(bandwidthText, "67.25", "0.00"), "no number": strings.ReplaceAll(bandwidthText, "67.25", "nan"), "no time": strings.ReplaceAll(bandwidthText, "67.25", "inf")} {
		if v, err := parseBandwidth(text, 65536); err == nil {
			t.Errorf("%s: %v", name, v)
		}
	}
}

func TestParseLatency(t *testing.T) {
	took, err := parseLatency("#, usec\n1, 12.50\n2, 7.25\n #bytes #iterations\n 65536 2 7.25 12.50\n")
	if err != nil || !slices.Equal(took, []float64{12.5, 7.25}) {
		t.Errorf("%v, %v", took, err)
	}
	for _, text := range []string{"", "1, x\n", "#, usec\n", "1, 7.25\n2, inf\n", "1, 0.00\n"} {
		if _, err := parseLatency(text); err == nil {
			t.Errorf("%q: accepted", text)
		}
	}
}

// A stand-in for perftest: a server that listens until its client came, and a client that tells a rate, or fails.
func fakePerftest(t *testing.T, client string) *perftest {
	t.Helper()
	python := "#!/usr/bin/env python3\nimport socket, sys\na = sys.argv\nport = int(a[a.index('-p') + 1])\n" +
		"if a[-1] == '127.0.0.1':\n  socket.create_connection(('127.0.0.1', port)).close()\n  " + client + "\nelse:\n  s = socket.create_server(('', port)); s.accept()\n"
	dir := t.TempDir()
	for _, name := range []string{writeBW, readBW, writeLat} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(python), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	p, err := newPerftest(transfer.PortStatus{Device: "rxe0", Port: 1, GIDIndex: 1})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPerftest(t *testing.T) {
	p := fakePerftest(t, "print(a[a.index('-s') + 1], a[a.index('-n') + 1], '70.00 64.00 0.001')")
	m, err := p.bandwidth(t.Context(), writeBW, 64*kib, 64*mib, 2)
	if err != nil || m.Bytes != 64*mib || m.Seconds != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	p = fakePerftest(t, "sys.exit('Couldn\\'t create QP')")
	if _, err := p.bandwidth(t.Context(), writeBW, 64*kib, 64*mib, 1); err == nil || !strings.Contains(err.Error(), "create QP") {
		t.Errorf("a client that failed: %v", err)
	}
}

func TestPerftestMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := newPerftest(transfer.PortStatus{}); err == nil || !strings.Contains(err.Error(), "apt-get install -y perftest") {
		t.Error(err)
	}
}

// Posts need no device; the rest says what to do about it.
func TestRDMAWithoutDevice(t *testing.T) {
	o := smallOptions()
	o.Transport, o.Parts = "rdma", []string{partPosts}
	r, err := Transfer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Posts) != 3 && len(r.NotMeasured) == 0 {
		t.Errorf("%+v", r.Posts)
	}
	for _, p := range r.Posts {
		if p.Ours <= 0 || p.Loop <= 0 || p.Chain <= 0 || p.PerSec <= 0 || p.RatioMin > p.Ratio || p.RatioMax < p.Ratio {
			t.Errorf("%+v", p)
		}
	}
	if _, err := usedPorts(); err == nil {
		t.Skip("there is an RDMA device here")
	}
	o.Parts = []string{partSizes}
	if _, err := Transfer(t.Context(), o); err == nil || !strings.Contains(err.Error(), "make lab") {
		t.Errorf("without a device: %v", err)
	}
}

func TestRDMAVerdicts(t *testing.T) {
	row := func(block int, one, many float64) Row {
		return Row{Part: partSizes, Transport: "rdma", BlockBytes: block, Others: []Other{{Name: writeBW, Ratio: one}, {Name: readBW, Ratio: 9}, {Name: writeBW + " -q 2", Ratio: many}}}
	}
	for _, c := range []struct {
		name string
		rows []Row
		post float64
		want [5]string
	}{
		{"good", []Row{row(4*kib, 0.1, 0.1), row(16*kib, 0.8, 0.9), row(64*kib, 1, 1), row(mib, 0.9, 0.95)}, 2, [5]string{Holds, Holds, Holds, Holds, Holds}},
		{"bad", []Row{row(16*kib, 0.7, 0.7), row(64*kib, 1, 1), row(mib, 0.89, 0.8)}, 2.1, [5]string{Fails, Fails, Fails, Fails, Fails}},
		{"one lane", []Row{{Part: partSizes, Transport: "rdma", BlockBytes: 64 * kib, Others: []Other{{Name: writeBW, Ratio: 1}}}}, 1, [5]string{Holds, NotMeasured, NotMeasured, NotMeasured, Holds}},
	} {
		r := &Report{Rows: c.rows, Posts: []PostRow{{Blocks: 64, Ratio: 9}, {Blocks: 1000, Ratio: c.post}}}
		r.judge()
		var got [5]string
		for i, v := range r.Verdicts[len(r.Verdicts)-5:] {
			got[i] = v.State
		}
		if got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		var b bytes.Buffer
		if err := Print(&b, r, false); err != nil || strings.Contains(b.String(), "NaN") {
			t.Errorf("%s: %v\n%s", c.name, err, b.String())
		}
		if err := json.NewEncoder(&b).Encode(r); err != nil {
			t.Error(err)
		}
	}
}
