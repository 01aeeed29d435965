package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

func write(t *testing.T, name, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func known(word string) bool {
	return strings.Contains(" listen env etcd threads data-dir kv-memory router node ", " "+word+" ")
}

func TestStrengthRisesFromFileToEnvToFlag(t *testing.T) {
	file := write(t, "c.yaml", `
listen: file-top
etcd: [a:1, b:2]
threads: 3
data-dir: file-top
kv-memory: 1GiB
env: ["A=1,2", B=3]
router:
  threads: 4
node:
  threads: 5
`, 0o600)
	fs := pflag.NewFlagSet("router", pflag.ContinueOnError)
	listen := fs.String("listen", "default", "")
	etcd := fs.StringSlice("etcd", nil, "")
	threads := fs.Int("threads", 0, "")
	dir := fs.String("data-dir", "default", "")
	env := fs.StringArray("env", nil, "")
	untouched := fs.String("other", "default", "")
	node := fs.String("node", "default", "") // also the name of a section
	memory := Size(1)
	fs.Var(&memory, "kv-memory", "")
	if err := fs.Parse([]string{"--listen", "flag"}); err != nil {
		t.Fatal(err)
	}
	err := Apply(fs, Source{File: file, Section: "router", Known: known,
		Env: []string{"HEADRACE_LISTEN=env", "HEADRACE_DATA_DIR=env", "HEADRACE_UNRELATED=1", "PATH=x"}})
	if err != nil {
		t.Fatal(err)
	}
	if *listen != "flag" || *dir != "env" || *threads != 4 || strings.Join(*etcd, " ") != "a:1 b:2" || memory != 1<<30 || *untouched != "default" || *node != "default" || strings.Join(*env, " ") != "A=1,2 B=3" {
		t.Errorf("listen %q data-dir %q threads %d etcd %q kv-memory %d other %q node %q env %q", *listen, *dir, *threads, *etcd, memory, *untouched, *node, *env)
	}
}

func TestApplyRefuses(t *testing.T) {
	for name, row := range map[string]struct {
		text string
		env  []string
		want string
	}{
		"a misspelt option":    {text: "lisen: x", want: "no such option: lisen"},
		"a misspelt section":   {text: "rooter: {threads: 1}", want: "no such option: rooter.threads"},
		"a value of no use":    {text: "threads: many", want: "threads: "},
		"no YAML":              {text: "a: [", want: "read configuration"},
		"a variable of no use": {env: []string{"HEADRACE_THREADS=x"}, want: "HEADRACE_THREADS: "},
	} {
		t.Run(name, func(t *testing.T) {
			fs := pflag.NewFlagSet("router", pflag.ContinueOnError)
			fs.Int("threads", 0, "")
			err := Apply(fs, Source{File: write(t, "c.yaml", row.text, 0o600), Section: "router", Known: known, Env: row.env})
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("%v, want %q", err, row.want)
			}
		})
	}
	if err := Apply(pflag.NewFlagSet("", pflag.ContinueOnError), Source{File: "/nonexistent"}); err == nil {
		t.Error("a missing file was taken")
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "1048576": 1 << 20, "512MiB": 512 << 20, "512 mib": 512 << 20, "2g": 2 << 30, "1.5GiB": 3 << 29, "10kB": 10000, "7B": 7,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%q is %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "x", "-1", "1e30", "inf", "nan", "0x10", "9999999TiB", "MiB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q was taken as %d", text, got)
		}
	}
	for size, want := range map[Size]string{0: "0", 5: "5", 1 << 20: "1MiB", 3 << 29: "1536MiB", 1 << 40: "1TiB"} {
		if got := size.String(); got != want {
			t.Errorf("%d is written %q, want %q", uint64(size), got, want)
		}
	}
}

func TestKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	first, err := EnsureKey(path)
	if err != nil || len(first) != keyBytes {
		t.Fatal(len(first), err)
	}
	again, err := EnsureKey(path)
	if err != nil || string(again) != string(first) {
		t.Errorf("a second look gave another key, %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Error("key file", info.Mode(), err)
	}
	if names, _ := os.ReadDir(filepath.Dir(path)); len(names) != 1 {
		t.Errorf("%d files are left beside the key", len(names)-1)
	}
	for text, mode := range map[string]os.FileMode{strings.Repeat("ab", keyBytes): 0o644, "abcd": 0o600, strings.Repeat("zz", keyBytes): 0o600} {
		if _, err := ReadKey(write(t, "key", text, mode)); err == nil {
			t.Errorf("key %q with mode %o was taken", text, mode)
		}
	}
}

func TestLogger(t *testing.T) {
	for _, row := range [][2]string{{"info", "text"}, {"DEBUG", "json"}} {
		if _, err := NewLogger(os.Stderr, row[0], row[1]); err != nil {
			t.Error(err)
		}
	}
	for _, row := range [][2]string{{"loud", "text"}, {"info", "xml"}} {
		if _, err := NewLogger(os.Stderr, row[0], row[1]); err == nil {
			t.Errorf("level %q with format %q was taken", row[0], row[1])
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"1", "1.5GiB", "-1", "1e9", "", "9223372036854775807"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		v, err := ParseSize(s)
		if err != nil {
			return
		}
		if back, err := ParseSize(v.String()); err != nil || back != v {
			t.Fatalf("%q is %d, which is written %q and read as %d, %v", s, uint64(v), v.String(), uint64(back), err)
		}
	})
}

func FuzzConfigFile(f *testing.F) {
	f.Add([]byte("listen: x\nrouter: {threads: 1}\netcd: [a, b]"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		k := koanf.New(".")
		if parse(k, data) != nil {
			return
		}
		_ = checkWords(k, Source{Known: known})
		for _, key := range k.Keys() {
			_ = text(k, key)
		}
	})
}
