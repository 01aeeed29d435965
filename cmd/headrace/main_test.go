package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// call runs a command line and returns its exit status and what it wrote.
func call(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	status = run(t.Context(), args, &out, &errOut)
	return status, out.String(), errOut.String()
}

func everyCommand(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		if sub.Name() != "help" && sub.Name() != "completion" {
			everyCommand(sub, visit)
		}
	}
}

func TestEveryCommandHasHelpWithAnExample(t *testing.T) {
	everyCommand((&app{}).root(), func(cmd *cobra.Command) {
		if cmd.Short == "" || !strings.Contains(cmd.Example, cmd.CommandPath()) {
			t.Errorf("%s: short %q, example %q", cmd.CommandPath(), cmd.Short, cmd.Example)
		}
		status, out, errOut := call(t, append(strings.Fields(cmd.CommandPath())[1:], "--help")...)
		if status != exitDone || !strings.Contains(out, "Examples:") || errOut != "" {
			t.Errorf("%s --help: status %d, wrote %q and %q", cmd.CommandPath(), status, out, errOut)
		}
	})
}

// TestFlagsMeanTheSameEverywhere: a flag's name has one type and one way to write its value.
func TestFlagsMeanTheSameEverywhere(t *testing.T) {
	types := map[string]string{}
	everyCommand((&app{}).root(), func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if before, ok := types[f.Name]; ok && before != f.Value.Type() {
				t.Errorf("%s --%s is a %s, elsewhere a %s", cmd.CommandPath(), f.Name, f.Value.Type(), before)
			}
			types[f.Name] = f.Value.Type()
			if f.Usage == "" {
				t.Errorf("%s --%s says nothing", cmd.CommandPath(), f.Name)
			}
		})
	})
}

func TestMisuseIsOneLineAndStatus2(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("lisen: 127.0.0.1:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"upp":                                      `did you mean "up"?`,
		"bench tranfser":                           `did you mean "transfer"?`,
		"nonsense":                                 `unknown command "nonsense"`,
		"up --modle x":                             "did you mean --model?",
		"up --zzzzzz":                              "unknown flag: --zzzzzz",
		"up surplus":                               `unexpected argument "surplus"`,
		"up --nodes many":                          `"many"`,
		"up --decode 0":                            "at least one of each",
		"up --logs nowhere":                        "use files or stderr",
		"up --log-level loud --model x":            `log level "loud"`,
		"up --config " + file:                      "no such option: lisen",
		"up --config /nonexistent":                 "read configuration",
		"worker --role boss":                       "use prefill, decode or both",
		"worker --threads -1":                      "cannot be negative",
		"worker --kv-memory lots":                  "is no size",
		"worker --model x --listen 8000":           "use HOST:PORT",
		"worker --model x --listen fd:0":           "not a passed descriptor",
		"up --engine sglang":                       "use vllm, vllm-nixl, vllm-plain",
		"up --engine vllm":                         "--model is needed",
		"up --engine vllm --command x":             "give one of them",
		"up -- --max-model-len 5":                  "use --engine or --command",
		"up --command run{x}":                      "{x} is no placeholder",
		"up --command x --prefill 1":               "use --prefill 0 --decode 2",
		"router":                                   "--etcd is needed",
		"engine":                                   "one of --engine, --command and --watch",
		"engine --engine sglang":                   "use vllm, vllm-nixl, vllm-plain",
		"engine --engine vllm surplus":             "stand behind --",
		"engine --command run{modle}":              "{modle} is no placeholder",
		"engine --command run{model}":              "--model is needed",
		"engine --watch h:1":                       "use http://HOST:PORT",
		"engine --watch http://h:1 -- x":           "starts nothing",
		"engine --command x --role boss":           "use prefill, decode or both",
		"engine --command x --dialect latin":       "use one of vllm",
		"engine --command x --kv-address 8998":     "use HOST:PORT",
		"engine --command x --env FOO":             "use NAME=VALUE",
		"engine --command x --device tpu":          "use auto, cpu or cuda",
		"engine --command x --listen 80":           "use HOST:PORT",
		"engine --engine vllm":                     "--model is needed",
		"connector whale":                          `did you mean "wheel"?`,
		"connector wheel":                          "name one folder",
		"tinymodel":                                "--out is needed",
		"bench transfer --transport pigeon":        "choose tcp, shm, rdma or all",
		"bench transfer --part all":                "choose of",
		"bench transfer --block 1000":              "multiple of 64",
		"bench model --models gpt-2":               "choose of",
		"bench model --prefill-rate fast":          "use TOKENS/S",
		"doctor --peer h:1 --serve h:2":            "give one of them",
		"status --json=perhaps":                    "perhaps",
		"drain":                                    "the id of one worker",
		"drain a b":                                "the id of one worker",
		"router --policy fastest":                  "use joint",
		"router --tokenizer m=/nonexistent":        "give a model's folder",
		"router --tokenizer /dev --tokenizer /dev": "has one already",
		"router --trace-ratio 2":                   "from 0 to 1",
		"router --otlp-endpoint ftp://h:1":         "use http://HOST:PORT",
		"router --admin nowhere":                   "use HOST:PORT",
		"router --admin=":                          "cannot be empty",
		"router --listen h:99999":                  "is no port",
		"router --advertise h:0":                   "no port that can be connected to",
		"router --api-keys-file /nonexistent":      "read API keys",
		"router --request-timeout -1s":             "cannot be negative",
		"router --session-ttl soon":                "use a time as",
		"router --max-concurrent -1":               "is negative",
		"router --session-header a:b":              "no request can have such a header",
		"router --etcd nonsense":                   "use HOST:PORT",
		"router --etcd h:1,ftp://h:1":              `"ftp://h:1": use HOST:PORT`,
		"worker --advertise nowhere":               "use HOST:PORT",
		"worker --kv-events nowhere":               "use HOST:PORT",
		"worker --kv-events-replay h:1":            "of no use without",
		"standin --advertise :1":                   "use HOST:PORT",
		"engine --watch http://h:1 --weight 3":     "from 0 to 1",
		"engine --command x --start-timeout -1s":   "cannot be negative",
		"drain x --etcd nonsense":                  "use HOST:PORT",
		"trace --router nowhere":                   "use HOST:PORT",
		"doctor --peer nowhere":                    "use HOST:PORT",
		"node --transport pigeon":                  "use auto, tcp, shm or rdma",
		"node --method magic":                      "choose auto, direct or staged",
		"node --checksum some":                     "choose off, sampled",
		"node --telemetry magic":                   "choose auto, ebpf",
		"node --lanes -1":                          "1 to 64",
		"bench transfer --svg /nonexistent/x.svg":  "no such file",
		"bench transfer --peers=/nonexistent":      "no such file",
		"bench router --model /nonexistent":        "no such file",
		"bench router --profiles /nonexistent":     "no such file",
		"bench engine --threads -1":                "cannot be negative",
		"bench pairing --decode 0":                 "over 0",
		"bench pairing --speedup 0":                "over 0",
		"bench pairing --trace /nonexistent":       "no such file",
		"router --etcd h:1 --tenant-weight a":      "use NAME=WEIGHT",
		"router --etcd h:1 --tenant-weight a=":     "is no number",
		"router --etcd h:1 --tenant-weight a=0":    "a weight is from 0.001 to 1000",
		"router --etcd h:1 --priority-aging -1s":   "0 is for never",
		"router --etcd h:1 --max-queue-bytes 1MiB": "lower max-body",
		"router --etcd h:1 --queue-timeout -1s":    "0 is none",
		"router --etcd h:1 --breaker-share 2":      "at most 1",
		"router --etcd h:1 --eject-share 2":        "at most 1",
		"router --etcd h:1 --breaker-failures -1":  "negative",
		"node --log-format xml":                    `log format "xml"`,
		"up --transport pigeon --model x":          "use auto, tcp, shm or rdma",
		"up --transport shm --nodes 2":             "shared memory joins",
		"node --rdma-gid-index best":               "use auto, or an index",
		"node --rdma-gid-index -1":                 "GID index -1",
		"node --rdma-pkey ffff":                    "use a partition key as 0x8001",
		"node --rdma-service-level 16":             "use 0 to 15",
		"up --rdma-ack-timeout 32":                 "use 1 to 31",
		"up --rdma-traffic-class 256":              "DSCP d is traffic class 4*d",
		"up --rdma-devices mlx5_0,,":               `device ""`,
		"node --rdma-vfs eth0":                     "as eth0=2",
		"node --rdma-vf-mtu 4200":                  "use --rdma-vfs too",
		"up --rdma-vf-addresses 10.0.0.1":          "as 10.1.0.5/24",
		"up --listen nowhere --model x.gguf":       "use HOST:PORT",
	} {
		status, out, errOut := call(t, strings.Fields(line)...)
		if status != exitMisused || out != "" || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, want) || !strings.Contains(errOut, "--help") {
			t.Errorf("%s: status %d, wrote %q and %q, want one line with %q", line, status, out, errOut, want)
		}
	}
}

func TestFailureIsOneLineAndStatus1(t *testing.T) {
	dir := t.TempDir()
	for line, want := range map[string]string{
		"status --data-dir " + dir:                    "nothing runs in " + dir,
		"status --etcd 127.0.0.1:1":                   "read registry",
		"up --model /nonexistent.gguf":                "no such file",
		"worker --model /nonexistent.gguf":            "no such file",
		"node --cluster-key-file /nonexistent --id n": "read cluster key",
		"tinymodel --out /nonexistent/tiny.gguf":      "no such file",
		"engine --engine vllm --model /nonexistent":   "takes a folder",
		"router --etcd e:1 --cluster-key-file /none":  "read cluster key",
		"doctor --peer h:1 --cluster-key-file /none":  "read cluster key",
	} {
		status, out, errOut := call(t, strings.Fields(line)...)
		if status != exitFailed || out != "" || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, want) {
			t.Errorf("%s: status %d, wrote %q and %q, want one line with %q", line, status, out, errOut, want)
		}
	}
}

func TestJSONIsJSON(t *testing.T) {
	for _, line := range []string{"version --json", "doctor --json"} {
		status, out, errOut := call(t, strings.Fields(line)...)
		if status != exitDone || !json.Valid([]byte(out)) {
			t.Errorf("%s: status %d, wrote %q and %q", line, status, out, errOut)
		}
	}
	if status, out, _ := call(t, "version"); status != exitDone || !strings.HasPrefix(out, "headrace ") {
		t.Errorf("version: status %d, wrote %q", status, out)
	}
	if status, out, _ := call(t); status != exitDone || !strings.Contains(out, "Usage:") {
		t.Errorf("no arguments: status %d, wrote %q", status, out)
	}
}

func TestConnectorIsHandedOut(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	status, out, errOut := call(t, "connector", "path")
	if _, err := os.Stat(filepath.Join(strings.TrimSpace(out), "headrace", "client.py")); status != exitDone || err != nil {
		t.Errorf("path: status %d, wrote %q and %q, %v", status, out, errOut, err)
	}
	status, out, errOut = call(t, "connector", "wheel", t.TempDir())
	if info, err := os.Stat(strings.TrimSpace(out)); status != exitDone || err != nil || info.Size() == 0 {
		t.Errorf("wheel: status %d, wrote %q and %q, %v", status, out, errOut, err)
	}
}

func TestEnvironmentConfigures(t *testing.T) {
	t.Setenv("HEADRACE_TRANSPORT", "pigeon")
	if status, _, errOut := call(t, "bench", "transfer"); status != exitMisused || !strings.Contains(errOut, `"pigeon"`) {
		t.Errorf("status %d, wrote %q", status, errOut)
	}
	if status, _, errOut := call(t, "bench", "transfer", "--transport", "dove"); status != exitMisused || !strings.Contains(errOut, `"dove"`) {
		t.Errorf("a flag is weaker than the environment: status %d, wrote %q", status, errOut)
	}
}

func TestEditDistance(t *testing.T) {
	for _, row := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"model", "model", 0}, {"model", "modle", 1}, {"model", "mode", 1}, {"model", "", 5}, {"abc", "xyz", 3}} {
		if got := editDistance(row.a, row.b); got != row.want {
			t.Errorf("%q to %q is %d, want %d", row.a, row.b, got, row.want)
		}
	}
}

// What is set for RDMA on up reaches the node daemons as it was set, index 0 too.
func TestRDMASettingsAreHandedOn(t *testing.T) {
	fs := pflag.NewFlagSet("up", pflag.ContinueOnError)
	var up rdmaFlags
	up.add(fs)
	fs.String("transport", "auto", "")
	line := []string{"--rdma-devices", "mlx5_0,mlx5_1:2", "--rdma-gid-index=0", "--rdma-pkey", "0x8001", "--rdma-spin", "20us", "--rdma-vfs", "2,eth0=4", "--rdma-vf-addresses", "10.1.0.1/24", "--transport", "rdma"}
	if err := fs.Parse(line); err != nil {
		t.Fatal(err)
	}
	child := pflag.NewFlagSet("node", pflag.ContinueOnError)
	var node rdmaFlags
	node.add(child)
	if err := child.Parse(rdmaArgs(fs)); err != nil {
		t.Fatal(err)
	}
	want, err := up.config()
	if err != nil {
		t.Fatal(err)
	}
	got, err := node.config()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if got.GIDIndex == nil || *got.GIDIndex != 0 || got.PKey != 0x8001 || len(got.Devices) != 2 || len(got.VFs) != 2 || len(got.VFAddresses) != 1 {
		t.Errorf("%+v", got)
	}
}
