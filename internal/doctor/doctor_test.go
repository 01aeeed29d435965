package doctor

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/headrace/headrace/cgo"
)

func files(m map[string]string) fstest.MapFS {
	out := fstest.MapFS{}
	for name, text := range m {
		out[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return out
}

func TestThisHostIsFit(t *testing.T) {
	r := Run(os.DirFS("/"))
	var table, doc bytes.Buffer
	if err := r.Print(&table, false); err != nil {
		t.Fatal(err)
	}
	if err := r.Print(&doc, true); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", table.String())
	if !r.OK() {
		t.Error("something that is needed is missing")
	}
	for _, c := range r.Checks {
		if c.Name == "" || c.Detail == "" && c.Answer != Yes {
			t.Errorf("a check says too little: %+v", c)
		}
		if c.Answer == Lacking && c.Remedy == "" {
			t.Errorf("no remedy: %+v", c)
		}
	}
}

func TestChecksReadTheirFiles(t *testing.T) {
	const thp = "sys/kernel/mm/transparent_hugepage/enabled"
	for name, row := range map[string]struct {
		check  func() Check
		answer Answer
		detail string
	}{
		"reserved pages": {func() Check { return checkHugepages(files(map[string]string{"proc/meminfo": "HugePages_Total:  8\n"})) }, Yes, "8 reserved"},
		"transparent pages": {func() Check {
			return checkHugepages(files(map[string]string{"proc/meminfo": "HugePages_Total: 0\n", thp: "always [madvise] never"}))
		}, Yes, "transparent"},
		"no pages": {func() Check {
			return checkHugepages(files(map[string]string{"proc/meminfo": "HugePages_Total: 0\n", thp: "always madvise [never]"}))
		}, Lacking, "none"},
		"no meminfo": {func() Check { return checkHugepages(files(nil)) }, Unknown, "HugePages_Total"},
		"large buffers": {func() Check {
			return checkSendBuffer(files(map[string]string{"proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n"}))
		}, Yes, "4096 KiB"},
		"small buffers":   {func() Check { return checkSendBuffer(files(map[string]string{"proc/sys/net/ipv4/tcp_wmem": "1 2 3"})) }, Lacking, "0 KiB"},
		"odd buffers":     {func() Check { return checkSendBuffer(files(map[string]string{"proc/sys/net/ipv4/tcp_wmem": "a b c"})) }, Unknown, "a b c"},
		"no buffers":      {func() Check { return checkSendBuffer(files(nil)) }, Unknown, "cannot be read"},
		"an RDMA device":  {func() Check { return checkVerbs(cgo.Verbs{State: cgo.Listed, Devices: []string{"rxe0"}}) }, Yes, "rxe0"},
		"no RDMA library": {func() Check { return checkVerbs(cgo.Verbs{State: cgo.NoLibrary, Detail: "x"}) }, Lacking, "libibverbs.so.1"},
		"RDMA in doubt":   {func() Check { return checkVerbs(cgo.Verbs{State: cgo.Failed, Detail: "x"}) }, Unknown, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			if c := row.check(); c.Answer != row.answer || !strings.Contains(c.Detail, row.detail) {
				t.Errorf("%+v, want %s with %q", c, row.answer, row.detail)
			}
		})
	}
	if (&Report{Checks: []Check{{Answer: Lacking}, {Answer: Needed}}}).OK() {
		t.Error("a report is fine without what is needed")
	}
}
