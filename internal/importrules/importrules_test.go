package importrules

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/headrace/headrace"

// rule says what the packages below Of may import of this module. The first rule that fits a package counts.
// A name stands for a package and all below it; "=name" for the package alone.
type rule struct {
	of    string
	may   []string
	tests []string // what its tests may import beside
	why   string
}

var rules = []rule{
	{of: "cmd", may: []string{"router", "worker", "transfer/node", "transfer/ticket", "transfer/telemetry", "rdma", "bench", "internal", "cgo", "connectors", "scheduler"}, why: "commands put parts together and reach none of their insides"},
	{of: "test", may: []string{"test", "transfer", "rdma", "cgo", "router", "worker", "internal", "bench"}, why: "end-to-end tests look at everything from outside"},
	{of: "connectors", why: "a Python package and its bytes"},
	{of: "cgo", why: "the C shim knows nothing of us"},
	{of: "transfer/ticket", why: "the router uses tickets without the transfer core"},
	{of: "transfer/handshake", may: []string{"transfer/ticket"}, why: "who is no daemon shakes hands too"},
	{of: "transfer/recall", may: []string{"transfer/ticket", "transfer/handshake"}, tests: []string{"transfer"}, why: "the router recalls tickets without the transfer core"},
	{of: "transfer/node/wire", may: []string{"=transfer"}, why: "a codec needs the words and no behaviour"},
	{of: "transfer/node", may: []string{"transfer", "internal/memfd"}, tests: []string{"internal/memfd", "internal/stall"}, why: "the daemon does not know what a prompt is"},
	{of: "transfer/telemetry", may: []string{"=transfer"}, tests: []string{"cgo"}, why: "it knows lanes by their sockets and queue pairs alone"},
	{of: "transfer/transporttest", may: []string{"=transfer", "transfer/ticket", "internal/leaktest"}, why: "it tests transports through what they implement"},
	{of: "transfer", may: []string{"transfer/ticket", "transfer/handshake", "transfer/recall", "=transfer", "transfer/transporttest", "transfer/tcp", "transfer/shm"}, tests: []string{"internal/memfd", "internal/stall"}, why: "the core imports nothing of ours, its transports the core alone"},
	{of: "rdma", may: []string{"=transfer", "cgo"}, tests: []string{"transfer/tcp", "transfer/telemetry"}, why: "a transport"},
	{of: "router", may: []string{"router", "internal", "transfer/ticket", "transfer/recall"}, why: "the router never touches KV bytes"},
	{of: "scheduler/estimate", may: []string{"=scheduler/cluster", "internal/gguf"}, why: "it turns a model file's header into a claim"},
	{of: "scheduler/connector", may: []string{"internal"}, why: "it acts, and does not decide"},
	{of: "scheduler/operate", may: []string{"scheduler", "internal"}, why: "the loop around a planner observes, remembers and has connectors act"},
	{of: "scheduler", may: []string{"scheduler"}, tests: []string{"internal/gguf"}, why: "decisions are pure: they see snapshots"},
	{of: "worker/engine", may: []string{"worker", "=transfer", "transfer/ticket", "internal"}, tests: []string{"transfer"}, why: "the engine's loop sees the daemon through an interface"},
	{of: "worker/api", may: []string{"worker/sample", "worker/tokenizer", "worker/api", "internal/chat", "internal/openai"}, tests: []string{"worker"}, why: "HTTP knows the engine by its own interface"},
	{of: "=worker", may: []string{"worker", "=transfer", "transfer/node/nodeclient", "internal/chat", "internal/gguf", "internal/hostmem", "internal/memfd", "internal/openai"}, tests: []string{"internal", "transfer", "router"}, why: "it joins the engine's parts and knows neither router nor registry"},
	{of: "worker/kvevents", may: []string{"worker/kv", "internal/zmtp"}, tests: []string{"router/collect"}, why: "it publishes what the pool tells it"},
	{of: "worker/standin", may: []string{"worker/api", "internal/chat", "worker/kv", "worker/kvevents", "worker/tokenizer", "internal/openai"}, tests: []string{"internal", "router"}, why: "a stand-in shows the face of an engine and has no inside"},
	{of: "worker/gpumem", may: []string{"cgo", "internal/memfd"}, tests: []string{"transfer", "cgo"}, why: "it copies GPU memory and knows neither engine nor daemon"},
	{of: "worker", may: []string{"worker", "internal/bpe", "internal/gguf", "internal/memfd"}, tests: []string{"internal"}, why: "models, kernels and tokenizers stand alone"},
	{of: "bench", may: []string{"transfer", "rdma", "router", "worker", "internal", "bench", "scheduler", "planner", "cgo"}, why: "benchmarks drive the parts as users do"},
	{of: "internal/doctor", may: []string{"cgo", "=transfer", "transfer/telemetry", "internal"}, why: "it probes what the others would use"},
	{of: "internal/bpe", why: "it knows text and tokens and nothing else of ours"},
	{of: "internal/chat", may: []string{"internal/openai"}, tests: []string{"internal/gguf"}, why: "it renders messages and knows no model"},
	{of: "internal/gguf", why: "it reads a file format and knows no model"},
	{of: "internal", may: []string{"internal"}, why: "what everybody may import must not pull in the parts"},
}

func fits(pattern, pkg string) bool {
	if exact, ok := strings.CutPrefix(pattern, "="); ok {
		return pkg == exact
	}
	return pkg == pattern || strings.HasPrefix(pkg, pattern+"/")
}

func fitsAny(patterns []string, pkg string) bool {
	for _, p := range patterns {
		if fits(p, pkg) {
			return true
		}
	}
	return false
}

// check says what is wrong with pkg importing imported; "" is nothing. Both are relative to the module.
func check(pkg, imported string, test bool) string {
	if pkg == imported || test && strings.HasPrefix(imported, pkg+"/") {
		return ""
	}
	for _, r := range rules {
		if !fits(r.of, pkg) {
			continue
		}
		if fitsAny(r.may, imported) || test && (fitsAny(r.tests, imported) || strings.HasSuffix(imported, "test") || imported == "worker/tinymodel") {
			return ""
		}
		return pkg + " must not import " + imported + ": " + r.why
	}
	return pkg + " has no import rule; add one to internal/importrules"
}

// imports lists a file's imports.
func imports(t *testing.T, file string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, spec := range parsed.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, name)
	}
	return list
}

func TestImportsPointOneWay(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	err = filepath.WalkDir(root, func(file string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if e.IsDir() {
			if name := e.Name(); rel != "." && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" || name == "bin") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(file, "go.mod")); err == nil && rel != "." {
				return filepath.SkipDir // another module, as of generators
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") {
			return nil
		}
		files++
		pkg := path.Dir(filepath.ToSlash(rel))
		for _, imported := range imports(t, file) {
			if imported == "C" && pkg != "cgo" {
				t.Errorf("%s imports C; only cgo may", rel)
			}
			if ours, ok := strings.CutPrefix(imported, module+"/"); ok {
				if problem := check(pkg, ours, strings.HasSuffix(file, "_test.go")); problem != "" {
					t.Errorf("%s: %s", rel, problem)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 50 {
		t.Errorf("only %d files were looked at", files)
	}
}

func TestRulesForbidWhatTheyAreFor(t *testing.T) {
	for _, pair := range [][2]string{
		{"transfer", "internal/config"}, {"transfer", "transfer/node"}, {"transfer/tcp", "internal/registry"},
		{"router", "transfer"}, {"router/dialects", "transfer/node"}, {"router", "worker"},
		{"scheduler", "router"}, {"scheduler", "transfer"}, {"scheduler", "internal/registry"},
		{"worker", "router"}, {"worker/model", "transfer"}, {"worker", "internal/registry"}, {"worker/api", "worker/engine"},
		{"cmd/headrace", "transfer"}, {"internal/config", "router"}, {"internal/supervise", "worker"},
		{"transfer/ticket", "transfer"}, {"transfer/recall", "transfer"}, {"transfer/handshake", "transfer"}, {"router", "transfer/handshake"}, {"newcomer", "transfer"}, {"transfer/node", "router"}, {"cgo", "transfer"},
	} {
		if check(pair[0], pair[1], false) == "" {
			t.Errorf("%s may import %s", pair[0], pair[1])
		}
	}
	for _, pair := range [][2]string{
		{"cmd/headrace", "router/pairing"}, {"router/dialects", "transfer/ticket"}, {"router/dialects", "transfer/recall"}, {"transfer/tcp", "transfer"},
		{"worker", "transfer/node/nodeclient"}, {"worker/engine", "worker/kv"},
	} {
		if problem := check(pair[0], pair[1], false); problem != "" {
			t.Error(problem)
		}
	}
}
