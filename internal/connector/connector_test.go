package connector

import (
	"archive/zip"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// pkg is a package as a program carries it.
func pkg() fstest.MapFS {
	return fstest.MapFS{
		"pyproject.toml":                   {Data: []byte("[project]\nname = \"headrace\"\ndescription = \"moves\"\nrequires-python = \">=3.10\"\nversion = \"1.2.3\"\ndependencies = []\n")},
		"README.md":                        {Data: []byte("# words\n")},
		"headrace/__init__.py":             {Data: []byte("value = 7\n")},
		"headrace/py.typed":                {},
		"headrace/vllm/__init__.py":        {Data: []byte("from headrace import value\n")},
		"headrace/__pycache__/x.cpython":   {Data: []byte("old")},
		"headrace/vllm/.cache":             {Data: []byte("old")},
		"headrace/vllm/__pycache__/y.py":   {Data: []byte("old")},
		"headrace/vllm/connector.cfg.orig": {Data: []byte("old")},
	}
}

func TestUnpack(t *testing.T) {
	cache := t.TempDir()
	dir, err := Unpack(pkg(), cache)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	_ = filepath.Walk(dir, func(p string, info os.FileInfo, _ error) error {
		if !info.IsDir() {
			rel, _ := filepath.Rel(dir, p)
			got = append(got, rel)
		}
		return nil
	})
	if want := []string{"headrace/__init__.py", "headrace/py.typed", "headrace/vllm/__init__.py"}; !slices.Equal(got, want) {
		t.Errorf("unpacked %q, want %q", got, want)
	}
	broken := filepath.Join(dir, "headrace/__init__.py")
	if err := os.WriteFile(broken, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := Unpack(pkg(), cache)
	if data, _ := os.ReadFile(broken); err != nil || again != dir || string(data) != "value = 7\n" {
		t.Errorf("the second time it is %s, %v, with %q in a file that was broken", again, err, data)
	}
	changed := pkg()
	changed["headrace/__init__.py"].Data = []byte("value = 8\n")
	if other, err := Unpack(changed, cache); err != nil || other == dir {
		t.Errorf("another content is in the same folder %s, %v", other, err)
	}
	if _, err := Unpack(pkg(), filepath.Join(broken, "x")); err == nil || !strings.Contains(err.Error(), "XDG_CACHE_HOME") {
		t.Error(err)
	}
}

func TestWheel(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	first, err := Wheel(pkg(), a)
	if err != nil {
		t.Fatal(err)
	}
	second, err := Wheel(pkg(), b)
	if err != nil {
		t.Fatal(err)
	}
	x, _ := os.ReadFile(first)
	y, _ := os.ReadFile(second)
	if filepath.Base(first) != "headrace-1.2.3-py3-none-any.whl" || !bytes.Equal(x, y) {
		t.Errorf("%s has %d bytes, %s %d", first, len(x), second, len(y))
	}
	z, err := zip.NewReader(bytes.NewReader(x), int64(len(x)))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range z.File {
		names = append(names, f.Name)
		if f.Name == "headrace-1.2.3.dist-info/METADATA" {
			r, err := f.Open()
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(r)
			if !strings.Contains(string(text), "Name: headrace\nVersion: 1.2.3\nSummary: moves\n") || !strings.HasSuffix(string(text), "\n\n# words\n") {
				t.Errorf("METADATA: %s", text)
			}
		}
	}
	if want := "headrace-1.2.3.dist-info/RECORD"; names[len(names)-1] != want || len(names) != 6 {
		t.Errorf("%q, want %s last", names, want)
	}
	for _, lacks := range []string{"version", "dependencies"} {
		p := pkg()
		p["pyproject.toml"].Data = bytes.Replace(p["pyproject.toml"].Data, []byte(lacks), []byte("x"), 1)
		if _, err := Wheel(p, a); err == nil {
			t.Errorf("a pyproject.toml without %s was taken", lacks)
		}
	}
}

// TestPipTakesTheWheel holds the wheel against pip itself, where there is one.
func TestPipTakesTheWheel(t *testing.T) {
	if exec.Command("python3", "-m", "pip", "--version").Run() != nil {
		t.Skip("no pip here")
	}
	dir := t.TempDir()
	wheel, err := Wheel(pkg(), dir)
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dir, "target")
	cmd := exec.Command("python3", "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "--target", target, wheel)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd = exec.Command("python3", "-c", "import headrace.vllm, importlib.metadata as m; print(headrace.vllm.value, m.version('headrace'))")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+target)
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "7 1.2.3\n" {
		t.Errorf("%v: %s", err, out)
	}
}
