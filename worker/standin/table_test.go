package standin

import (
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
)

func TestDefaultTableIsWhole(t *testing.T) {
	table := DefaultTable()
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
	last := 0.0
	for _, n := range []int{1, 2, 100, 128, 500, 512, 2000, 2048, 5000} {
		s := table.prefillSeconds(n, 0)
		if s < last {
			t.Errorf("%d tokens in %v s, fewer in %v", n, s, last)
		}
		last = s
	}
	if one, many := table.decodeSeconds(1, 0), table.decodeSeconds(64, 4096); one < 0.018 || one > 0.02 || many < 0.05 || many > 0.07 {
		t.Errorf("a step of one stream %v s, of 64 at 4,096 tokens %v s", one, many)
	}
}

func TestTableIsLinearBetweenRowsAndBehindThem(t *testing.T) {
	table := small()
	table.Decode = []DecodeRow{{2, 100, 3}, {1, 0, 1}, {1, 100, 2}, {2, 0, 2}}
	table.PrefillContextSeconds = 0.001
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ got, want float64 }{
		{table.prefillSeconds(0, 0), 0}, {table.prefillSeconds(50, 0), 0.5}, {table.prefillSeconds(300, 0), 3}, {table.prefillSeconds(50, 100), 0.6},
		{table.decodeSeconds(0, 0), 0}, {table.decodeSeconds(1, 50), 1.5}, {table.decodeSeconds(2, 200), 4}, {table.decodeSeconds(3, 0), 3},
	} {
		if math.Abs(row.got-row.want) > 1e-9 {
			t.Errorf("%v s, want %v", row.got, row.want)
		}
	}
}

func TestTablesThatCannotBe(t *testing.T) {
	for text, want := range map[string]string{
		"blocks: 1":                           "blocks is 1",
		"block_tokens: 0":                     "block_tokens is 0",
		"blocs: 100":                          "unknown field",
		"prefill: []":                         "prefill has no rows",
		"prefill: [{tokens: 1, seconds: -1}]": "prefill: 1 tokens",
		"prefill: [{tokens: 1, seconds: 2}, {tokens: 2, seconds: 1}]": "in less time",
		"decode: []":                         "decode has no rows",
		"decode: [{streams: 0, seconds: 1}]": "decode: 0 streams",
		"decode: [{streams: 1, context: 0}, {streams: 1, context: 5}, {streams: 2, context: 0}]": "no whole grid",
		"decode: [{streams: 1, context: 0}, {streams: 1, context: 0}]":                           "twice",
		"transfer_bytes_per_second: 0":                                                           "must be over 0",
		"kv_bytes_per_token: -1":                                                                 "cannot be negative",
		"[":                                                                                      "",
	} {
		if _, err := ParseTable([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	table, err := ParseTable([]byte(`{"blocks": 100, "decode": [{"streams": 1, "context": 0, "seconds": 0.5}]}`))
	if err != nil || table.Blocks != 100 || table.BlockTokens != 16 || len(table.Decode) != 1 || table.decodeSeconds(7, 99) != 0.5 {
		t.Errorf("%+v, %v", table, err)
	}
}

func FuzzTable(f *testing.F) {
	f.Add([]byte("blocks: 100\nprefill: [{tokens: 1, seconds: 1}]"))
	f.Add([]byte(`{"decode": [{"streams": 1, "context": 0, "seconds": 0.5}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		table, err := ParseTable(b)
		if err != nil {
			return
		}
		for _, n := range []int{0, 1, 17, 100000} {
			if s := table.prefillSeconds(n, 1) + table.decodeSeconds(n, float64(n)); s < 0 || math.IsNaN(s) {
				t.Errorf("%d: %v s", n, s)
			}
		}
	})
}

func TestDocumentedTableIsOne(t *testing.T) {
	doc, err := os.ReadFile("../../docs/standin.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "```yaml\n")
	example, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("there is no example")
	}
	table, err := ParseTable([]byte(example))
	if err != nil {
		t.Fatal(err)
	}
	def := DefaultTable()
	if table.Decode = def.Decode; !reflect.DeepEqual(table, def) {
		t.Errorf("the example is %+v, the default %+v", table, def)
	}
}
