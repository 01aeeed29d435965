package sidecar

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestSplitWords(t *testing.T) {
	for line, want := range map[string][]string{
		``:                     nil,
		"  a  b\tc\n":          {"a", "b", "c"},
		`a 'b c' "d e"`:        {"a", "b c", "d e"},
		`a'b'"c"d`:             {"abcd"},
		`'' ""`:                {"", ""},
		`a\ b \'`:              {"a b", "'"},
		`"a\"b\\c\d\$"`:        {`a"b\c\d$`},
		`'{"a":"b c"}'`:        {`{"a":"b c"}`},
		"a \\\n b":             {"a", "b"},
		`x=1 'it'"'"'s' $HOME`: {"x=1", "it's", "$HOME"},
	} {
		if got, err := SplitWords(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q is %q, %v, want %q", line, got, err, want)
		}
	}
	for _, line := range []string{`'a`, `"a`, `a\`, "a\x00", strings.Repeat("a", templateBytesMax+1)} {
		if got, err := SplitWords(line); err == nil {
			t.Errorf("%.20q was taken as %.20q", line, got)
		}
	}
}

func TestTemplateExpands(t *testing.T) {
	tmpl, err := ParseTemplate(`A=x{port:a} B= run {model} --json '{"e":"{engine-id}","p":{port:a},"q":{"r":{port:b}}}' {{role}} {kv-role} {{{}}}`)
	if err != nil {
		t.Fatal(err)
	}
	next := 0
	v := &Values{Model: "m d", EngineID: "e 1", Port: 5, Role: "prefill", FreePort: func() (int, error) { next++; return 7000 + next, nil }}
	c, err := tmpl.Expand(v)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"run", "m d", "--json", `{"e":"e 1","p":7001,"q":{"r":7002}}`, "{{role}}", "kv_producer", "{{{}}}"}; !slices.Equal(c.Words, want) {
		t.Errorf("%q, want %q", c.Words, want)
	}
	if want := []string{"A=x7001", "B="}; !slices.Equal(c.Env, want) {
		t.Errorf("%q, want %q", c.Env, want)
	}
	if want := `A=x7001 B= run 'm d' `; !strings.HasPrefix(c.Line(), want) {
		t.Errorf("%s, want %s", c.Line(), want)
	}
}

func TestTemplateRefuses(t *testing.T) {
	for line, want := range map[string]string{
		"":             "names no program",
		"A=1":          "names no program",
		"run {modle}":  "{modle} is no placeholder; there are {bind-host}",
		"run {port:}x": "", // no placeholder at all: it is left alone
		"run 'x":       "without its fellow",
	} {
		_, err := ParseTemplate(line)
		if want == "" && err == nil {
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", line, err, want)
		}
	}
	for line, want := range map[string]string{"run {model}": "--model is needed", "run {node}": "--node is needed", "run {port:x}": "no ports"} {
		tmpl, err := ParseTemplate(line)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tmpl.Expand(&Values{FreePort: func() (int, error) { return 0, errors.New("no ports") }}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", line, err, want)
		}
	}
}

// TestNamedTemplates: each can be expanded, and its JSON is JSON.
func TestNamedTemplates(t *testing.T) {
	for _, name := range Names {
		for _, s := range []Shape{{Device: DeviceCPU, Threads: 2, ConnectorPath: "/c", PythonPath: "/p"}, {Device: DeviceCUDA, TensorParallel: 4, KVMemory: 1 << 30, BlockTokens: 32, Args: []string{"--last", "{port}"}}} {
			tmpl, err := Named(name, s)
			if err != nil {
				t.Fatal(err)
			}
			c, err := tmpl.Expand(&Values{Model: "/m", ModelName: "m", Host: "10.0.0.7", Port: 80, Role: "decode", EngineID: "e0", Socket: "/s", Python: "/py", FreePort: func() (int, error) { return 9, nil }})
			if err != nil {
				t.Fatal(name, err)
			}
			line := c.Line()
			for _, w := range c.Words {
				if strings.HasPrefix(w, "{") && !json.Valid([]byte(w)) {
					t.Errorf("%s: %s is no JSON", name, w)
				}
			}
			wants := []string{"/py -m vllm.entrypoints.cli.main serve /m --served-model-name m --host 10.0.0.7 --port 80", "tcp://[::ffff:10.0.0.7]:"}
			if s.Device == DeviceCPU {
				wants = append(wants, "OMP_NUM_THREADS=2", "--enforce-eager")
			} else {
				wants = append(wants, "--tensor-parallel-size 4", "--kv-cache-memory-bytes 1073741824", "--block-size 32", "--last 80")
			}
			if name == "vllm" {
				wants = append(wants, `"headrace_socket":"/s","headrace_engine":"e0"`)
				if s.ConnectorPath != "" {
					wants = append(wants, "PYTHONPATH=/c:/p")
				}
			}
			if name == "vllm-nixl" {
				wants = append(wants, `"kv_role":"kv_consumer"`, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.7")
			}
			for _, want := range wants {
				if !strings.Contains(line, want) {
					t.Errorf("%s lacks %s: %s", name, want, line)
				}
			}
		}
	}
	if _, err := Named("sglang", Shape{}); err == nil || !strings.Contains(err.Error(), "vllm-nixl") {
		t.Error(err)
	}
}

func TestBindHost(t *testing.T) {
	for host, want := range map[string]string{"127.0.0.1": "[::ffff:127.0.0.1]", "0.0.0.0": "*", "::": "*", "::1": "*", "gpu7": "*"} {
		if got := bindHost(host); got != want {
			t.Errorf("%s is %s, want %s", host, got, want)
		}
	}
}

func TestFigures(t *testing.T) {
	f := parseFigures("# HELP a b\n\nvllm:num_requests_running{engine=\"0\",m=\"a\\\"}b\\n\\\\\"} 2.0\nvllm:num_requests_running{engine=\"1\"} 1.0 123\nvllm:kv_cache_usage_perc 0.5\n" +
		"vllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",num_gpu_blocks=\"None\"} 1.0\nbroken{\nbroken{a=\"\n{} 1\nx y\nvllm:num_requests_waiting\n")
	if f.Running != 3 || f.Waiting != -1 || f.CacheUsage != 0.5 || f.BlockTokens != 32 || f.Blocks != 0 || f.CacheDType != "auto" || f.Steps != -1 {
		t.Errorf("%+v", f)
	}
}

func TestWhy(t *testing.T) {
	for text, want := range map[string]string{
		"":             "",
		"a\nb\nc\nd\n": "b | c | d",
		"ERROR 11-21 [core.py:1] torch.OutOfMemoryError: CUDA out of memory\nRuntimeError: Engine core initialization failed\n": "torch.OutOfMemoryError: CUDA out of memory",
		"(EngineCore pid=4) ERROR ValueError: too long\n":                                                                       "ValueError: too long",
		"api_server.py: error: argument --x: invalid\n":                                                                         "api_server.py: error: argument --x: invalid",
	} {
		l := &tail{out: &lines{}}
		l.drain(strings.NewReader(text))
		if got := l.why(); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestOlder(t *testing.T) {
	for _, row := range []struct {
		version, than string
		want          bool
	}{{"0.31.9", "0.32.0", true}, {"0.32.0", "0.32.0", false}, {"0.32.0+cpu", "0.32.0", false}, {"1.0", "0.32.0", false}, {"0.32", "0.32.0", true}, {"0.32.0rc1", "0.32.0", false}, {"0.4.2", "0.32.0", true}, {"dev", "0.32.0", false}} {
		if got := older(row.version, row.than); got != row.want {
			t.Errorf("%q older than %q: %v", row.version, row.than, got)
		}
	}
}

// fakePython is a program that answers as an interpreter does.
func fakePython(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPython(t *testing.T) {
	for says, want := range map[string]string{
		`{"python":"3.11.2","vllm":null}`:                                         "has no vLLM",
		`{"python":"3.11.2","vllm":"/v","vllm_version":"0.11.0"}`:                 "is older than Headrace's connector can serve",
		`{"python":"3.11.2","vllm":"/v","vllm_version":"0.32.0+cpu"}`:             "",
		`{"python":"3.11.2","vllm":"/v","vllm_version":"0.33.1","headrace":"/h"}`: "",
		`{"python":"3.11.2","vllm":"/v/__init__.py","vllm_version":"dev"}`:        "",
	} {
		p, err := FindPython(t.Context(), fakePython(t, "python3", "#!/bin/sh\necho '"+says+"'\n"))
		if err != nil {
			t.Fatal(err)
		}
		err = p.Check("vllm")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", says, err, want)
		}
		if p.VLLM != "" && p.Check("vllm-plain") != nil {
			t.Errorf("%s: plain vLLM is refused", says)
		}
	}
	for text, want := range map[string]string{"#!/bin/sh\necho no\n": "it is no Python", "#!/bin/sh\necho oops >&2; exit 1\n": "oops"} {
		if _, err := FindPython(t.Context(), fakePython(t, "python3", text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := FindPython(t.Context(), "/nonexistent/python"); err == nil || !strings.Contains(err.Error(), "--python") {
		t.Error(err)
	}
	python := fakePython(t, "python3.11", "")
	vllm := fakePython(t, "vllm", "#!"+python+"\nimport re\n")
	t.Setenv("PATH", filepath.Dir(vllm))
	if got := behindVLLM(); got != python {
		t.Errorf("%q is behind vllm, want %q", got, python)
	}
}

func TestCheckModel(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "x.gguf")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for model, want := range map[string]string{file: "is a file", dir: "has no config.json", "/nonexistent": "no such file", "org/name": ""} {
		if err := CheckModel(model); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", model, err, want)
		}
	}
}

func TestListens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if served, known := Listens(path); served || !known {
		t.Errorf("nothing: %v %v", served, known)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if served, _ := Listens(path); !served {
		t.Error("a listener is not seen")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if served, known := Listens(path); served || known {
		t.Errorf("a socket of a process that is gone: %v %v", served, known)
	}
	if served, known := Listens(t.TempDir()); served || !known {
		t.Errorf("a folder: %v %v", served, known)
	}
}

func TestAttachment(t *testing.T) {
	a, err := readAttachment([]byte(`{"engines":[{"engine_id":"x"},{"engine_id":"e","leases":2,"about":{"fingerprint":"f","block_tokens":32}}]}`), "e")
	if err != nil || a.Leases != 2 || a.About == nil || a.About.Fingerprint != "f" || a.About.BlockTokens != 32 {
		t.Errorf("%+v, %v", a, err)
	}
	if a, err := readAttachment([]byte(`{"engines":[{"engine_id":"x","about":null}]}`), "x"); err != nil || a.About != nil {
		t.Errorf("%+v, %v", a, err)
	}
	for _, text := range []string{`{"engines":[]}`, `x`, `{"engines":[{"engine_id":"e","about":3}]}`} {
		if a, err := readAttachment([]byte(text), "e"); err == nil {
			t.Errorf("%s is %+v", text, a)
		}
	}
}

func FuzzTemplate(f *testing.F) {
	for _, s := range []string{`A=1 run {model} '{"a":{port:x}}'`, `'a"b' "c'd" \x`, `{{model}}{port}}`, "a\\\nb ''", `"$x` + "`\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		words, err := SplitWords(line)
		if err != nil {
			return
		}
		again, err := SplitWords(JoinWords(words))
		if err != nil || !slices.Equal(again, words) {
			t.Fatalf("%q is written %q and read as %q, %v", words, JoinWords(words), again, err)
		}
		tmpl, err := ParseTemplate(line)
		if err != nil {
			return
		}
		v := &Values{Model: "m", Socket: "s", Node: "n", Python: "p", FreePort: func() (int, error) { return 9, nil }}
		c, err := tmpl.Expand(v)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ParseTemplate(c.Line()); err == nil && !slices.Equal(append(got.Env, got.Words...), append(c.Env, c.Words...)) {
			t.Fatalf("%q is pasted as %q and read as %q %q", c, c.Line(), got.Env, got.Words)
		}
	})
}

func FuzzFigures(f *testing.F) {
	f.Add("vllm:num_requests_running{engine=\"0\"} 1\nx{a=\"b\\\"\"} 2")
	f.Add("{\"}\n# x\nvllm:cache_config_info{block_size=\"")
	f.Fuzz(func(t *testing.T, text string) { parseFigures(text) })
}
