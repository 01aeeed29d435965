package sidecar

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// VLLMMin is the oldest vLLM whose connector interface Headrace's connector speaks.
const VLLMMin = "0.32.0"

// inspectTimeout bounds the look into a Python: a cold one on a slow disk takes seconds.
const inspectTimeout = time.Minute

// inspect finds packages without importing them: importing vLLM takes seconds and a GPU's memory.
const inspect = `
import importlib.util, json, os, sys
def where(name):
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        return None
    return spec and (spec.origin or list(spec.submodule_search_locations or [""])[0])
found = {"executable": sys.executable, "python": "%d.%d.%d" % sys.version_info[:3], "vllm": where("vllm"), "headrace": where("headrace"), "nixl": where("nixl") or where("rixl")}
try:
    names = {}
    exec(open(os.path.join(os.path.dirname(found["vllm"]), "_version.py")).read(), names)
    found["vllm_version"] = names["__version__"]
except Exception:
    pass
print(json.dumps(found))
`

// Python is an interpreter and what can be imported in it.
type Python struct {
	Executable  string `json:"executable"`
	Version     string `json:"python"`
	VLLM        string `json:"vllm"`         // where it is; "" for nowhere
	VLLMVersion string `json:"vllm_version"` // "" when it does not say
	Headrace    string `json:"headrace"`     // an installed connector
	Nixl        string `json:"nixl"`
}

// FindPython inspects the interpreter that was named, else the one that the vllm command on PATH runs in, else python3.
func FindPython(ctx context.Context, named string) (*Python, error) {
	path := named
	if path == "" {
		path = behindVLLM()
	}
	if path == "" {
		path = "python3"
	}
	exe, err := exec.LookPath(path)
	if err != nil {
		return nil, fmt.Errorf("find a Python with vLLM: %w; install vLLM (pip install vllm) and name its interpreter with --python", err)
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, "-c", inspect)
	out, err := cmd.Output()
	if err != nil {
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, firstLine(exit.Stderr))
		}
		return nil, fmt.Errorf("look into %s: %w; name another interpreter with --python", exe, err)
	}
	p := &Python{}
	if err := json.Unmarshal(out, p); err != nil {
		return nil, fmt.Errorf("look into %s: it is no Python: %w; name another interpreter with --python", exe, err)
	}
	p.Executable = exe // sys.executable of a virtual environment may be a link resolved; exe is what was asked for
	return p, nil
}

// behindVLLM reads the first line of the vllm command on PATH, which names its interpreter.
func behindVLLM() string {
	path, err := exec.LookPath("vllm")
	if err != nil {
		return ""
	}
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	line, _ := bufio.NewReaderSize(f, 512).ReadSlice('\n')
	text, ok := strings.CutPrefix(string(line), "#!")
	if !ok {
		return ""
	}
	words := strings.Fields(text)
	if len(words) == 2 && strings.HasSuffix(words[0], "/env") {
		words = words[1:]
	}
	if len(words) != 1 || !strings.Contains(words[0], "python") {
		return ""
	}
	return words[0]
}

// Check says why an engine cannot run here, nil when it can.
func (p *Python) Check(engine string) error {
	switch {
	case p.VLLM == "":
		return fmt.Errorf("%s (Python %s) has no vLLM; install it there (pip install vllm), or name the interpreter that has it with --python", p.Executable, p.Version)
	case engine == "vllm" && p.VLLMVersion != "" && older(p.VLLMVersion, VLLMMin):
		return fmt.Errorf("%s has vLLM %s, which is older than Headrace's connector can serve (%s): upgrade it (pip install -U vllm), or use --engine vllm-nixl or vllm-plain", p.Executable, p.VLLMVersion, VLLMMin)
	case engine == "vllm-nixl" && p.Nixl == "":
		return fmt.Errorf("%s has no NIXL, which NixlConnector needs: pip install nixl, or use --engine vllm", p.Executable)
	}
	return nil
}

// older compares the leading numbers of two versions. What is no number ends the comparison: 0.33.0rc1 is 0.33.0 here.
func older(version, than string) bool {
	a, b := strings.Split(version, "."), strings.Split(than, ".")
	for i := range b {
		if i >= len(a) {
			return true
		}
		x, whole := leadingNumber(a[i])
		y, _ := leadingNumber(b[i])
		if x != y {
			return x < y
		}
		if !whole {
			return false
		}
	}
	return false
}

func leadingNumber(s string) (n int, whole bool) {
	i := 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	n, _ = strconv.Atoi(s[:i])
	return n, i == len(s) && i > 0
}
