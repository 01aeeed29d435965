package pythontest

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
)

// zmqDir is the folder zmq beside this file.
func zmqDir() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "zmq")
}

// ZMQ is an interpreter with pyzmq, ZeroMQ's own library, and msgspec.
func ZMQ(t *testing.T) (python string) {
	t.Helper()
	if testing.Short() {
		t.Skip("it makes a Python environment; run without -short")
	}
	return Venv(t, filepath.Join(zmqDir(), "requirements.txt"))
}

// Publisher is a program that publishes KV events as engines do, from and to the ports given, with so many batches to
// replay. Its standard input says what.
func Publisher(python string, pub, replay, buffer int) *exec.Cmd {
	return exec.Command(python, filepath.Join(zmqDir(), "publisher.py"), strconv.Itoa(pub), strconv.Itoa(replay), strconv.Itoa(buffer))
}

// Tally is what a publisher's events come to.
type Tally struct {
	Next, Removed uint64
	Have          map[string]int // blocks by their content's key
}

// TallyOf asks the publisher that replays at a port of this host, by code that is none of ours.
func TallyOf(t *testing.T, python string, replayPort int) Tally {
	t.Helper()
	cmd := exec.Command(python, filepath.Join(zmqDir(), "tally.py"), strconv.Itoa(replayPort))
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	var x Tally
	if err == nil {
		err = json.Unmarshal(out, &x)
	}
	if err != nil {
		t.Fatalf("tally: %v: %.300s", err, out)
	}
	return x
}
