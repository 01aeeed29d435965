package planbench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// TestSmallRun measures a little: what is checked is that every part answers, not how fast.
func TestSmallRun(t *testing.T) {
	r, err := Run(t.Context(), Options{Nodes: []int{3, 9}, Instances: 100, Duration: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 2 || r.Rows[1].ScanAgreed != 200 || r.Rows[0].Filled == 0 || !r.Complete || r.Burst.Instances != 100 {
		t.Errorf("%+v", r)
	}
	var text, doc bytes.Buffer
	if err := Print(&text, r, false); err != nil || !strings.Contains(text.String(), "cost ~ nodes^") {
		t.Errorf("%v: %s", err, &text)
	}
	if err := Print(&doc, r, true); err != nil || !json.Valid(doc.Bytes()) {
		t.Errorf("%v: %s", err, &doc)
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	for _, o := range []Options{{Nodes: []int{0}}, {GPUs: 65}, {Instances: -1}} {
		if o.Check() == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}
