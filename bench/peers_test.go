package bench

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

// fakeDriver answers as a peer does, at once and without memory.
const fakeDriver = `
import json, sys
print(json.dumps({"what": "a fake over " + sys.argv[1]} if sys.argv[1] == "tcp" else {"error": "it has no local copy"}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    if call["op"] == "verify": answer = {"verified_bytes": int(sys.argv[2])}
    elif call["op"] == "latency": answer = {"micros": [1000.0] * call["count"]}
    elif call["batch"] == 16: answer = {"error": "sixteen is too much"}
    else: answer = {"bytes": call["bytes"], "seconds": 1.0, "cpu_seconds": 5.0}
    print(json.dumps(answer), flush=True)
`

// fakePeers stands for drivers whose requirements are installed already.
func fakePeers(t *testing.T) fstest.MapFS {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 to run drivers with")
	}
	const lock = "none==1\n"
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	sum := sha256.Sum256([]byte(lock))
	venv := filepath.Join(cache, "headrace", "peers-"+hex.EncodeToString(sum[:6]))
	if err := os.MkdirAll(filepath.Join(venv, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\nexec " + python + " \"$@\"\n"
	if err := os.WriteFile(filepath.Join(venv, "bin", "python"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(venv, "complete"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return fstest.MapFS{"requirements.txt": {Data: []byte(lock)}, "driver_nixl.py": {Data: []byte(fakeDriver)}}
}

func TestPeersAreMeasuredBeside(t *testing.T) {
	o := smallOptions()
	o.Peers = fakePeers(t)
	o.Blocks, o.Rounds, o.Parts = []int{64 * kib}, 1, []string{partSizes, partLatency, partBatches}
	r, err := Transfer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	row := r.row(partSizes, "tcp", 64*kib, 0, 0, 1)
	if row == nil || row.other(nixl) == nil || row.other(nixl).Ratio < 1 || row.other(nixl).CPURatio > 1 {
		t.Errorf("beside the fake: %+v", row)
	}
	if l := r.latency("tcp", 64*kib, nixl); l == nil || l.P50 != 1000 || l.P999 != 1000 {
		t.Errorf("its latency: %+v", l)
	}
	if row := r.row(partBatches, "tcp", 64*kib, 16, 0, 1); row == nil || row.other(nixl) != nil {
		t.Errorf("a request it refuses: %+v", row)
	}
	notes := strings.Join(r.NotMeasured, "\n")
	if !strings.Contains(notes, "sixteen is too much") || !strings.Contains(notes, "it has no local copy") {
		t.Errorf("notes: %s", notes)
	}
	for _, v := range r.Verdicts {
		if strings.Contains(v.Target, "p50 at most 2 of NIXL's") && v.State == NotMeasured {
			t.Errorf("%+v", v)
		}
	}
	if n := children(t); n != 0 {
		t.Errorf("%d children are left", n)
	}
}

func TestPeersThatCannotBeInstalledAreNamed(t *testing.T) {
	o := smallOptions()
	o.Peers = fakePeers(t)
	o.Transport, o.Parts, o.Blocks, o.Rounds = "shm", []string{partSizes}, []int{64 * kib}, 1
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("PATH", t.TempDir())
	r, err := Transfer(t.Context(), o)
	if err != nil || !strings.Contains(strings.Join(r.NotMeasured, "\n"), "apt-get install -y python3-venv") {
		t.Errorf("%v, %v", r.NotMeasured, err)
	}
	if strings.Contains(strings.Join(r.NotMeasured, "\n"), iperfMissing) != (r.row(partSizes, "shm", 64*kib, 0, 0, 1) != nil) {
		t.Errorf("without iperf3: %v", r.NotMeasured)
	}
}

func TestDriversComeAlong(t *testing.T) {
	for _, name := range []string{"peer.py", "requirements.txt", "driver_mooncake.py", "driver_nixl.py"} {
		f, err := Drivers().Open(name)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if _, err := b.ReadFrom(f); err != nil || b.Len() == 0 {
			t.Errorf("%s: %d bytes, %v", name, b.Len(), err)
		}
	}
}
