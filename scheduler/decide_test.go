package scheduler_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/headrace/headrace/scheduler"
	"github.com/headrace/headrace/scheduler/cluster"
	"github.com/headrace/headrace/scheduler/snapfile"
)

// permute puts the keys of every mapping in another order; lists keep theirs.
func permute(r *rand.Rand, n *yaml.Node) {
	for _, c := range n.Content {
		permute(r, c)
	}
	if n.Kind == yaml.MappingNode {
		r.Shuffle(len(n.Content)/2, func(i, j int) {
			n.Content[2*i], n.Content[2*j] = n.Content[2*j], n.Content[2*i]
			n.Content[2*i+1], n.Content[2*j+1] = n.Content[2*j+1], n.Content[2*i+1]
		})
	}
}

// TestOrderOfKeysIsNothing decides on every case with the keys of its mappings in other orders: the same bytes come out.
func TestOrderOfKeysIsNothing(t *testing.T) {
	files, err := filepath.Glob("testdata/cases/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(len(files), err)
	}
	r := rand.New(rand.NewPCG(1, 9))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := decide(t, text)
		var doc yaml.Node
		if err := yaml.Unmarshal(text, &doc); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			permute(r, &doc)
			other, err := yaml.Marshal(&doc)
			if err != nil {
				t.Fatal(err)
			}
			if got := decide(t, other); !bytes.Equal(got, want) {
				t.Fatalf("%s: with its keys in another order\n%s\nit decides\n%s\nand not\n%s", file, other, got, want)
			}
		}
	}
}

// TestEveryFigureIsTold: in every case's decision each denial has a reason, each placement its filters, stages and candidates with the scores' figures,
// and a total is the sum of its scores.
func TestEveryFigureIsTold(t *testing.T) {
	files, _ := filepath.Glob("testdata/cases/*.yaml")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		s, err := snapfile.Parse(text)
		if err != nil {
			t.Fatal(file, err)
		}
		d, err := scheduler.Decide(s)
		if err != nil {
			t.Fatal(file, err)
		}
		for _, p := range d.Placements {
			if p.Why == "" || len(p.Filters) != 6 || len(p.Fit) == 0 || len(p.Candidates) == 0 {
				t.Errorf("%s: %s is not explained: %+v", file, p.Instance, p)
			}
			for _, c := range p.Candidates {
				told(t, file, c.Scores, c.Total)
			}
		}
		for _, n := range d.Denied {
			if n.Reason == "" || (n.What == "instance" || n.What == "gang") && len(n.Filters) != 6 {
				t.Errorf("%s: %s %s is not explained: %+v", file, n.What, n.Name, n)
			}
		}
		for _, e := range d.Evictions {
			if e.Why == "" || e.For == "" || e.Action == "" {
				t.Errorf("%s: %+v", file, e)
			}
		}
		for _, a := range d.Admissions {
			if a.Why == "" || len(a.Nodes) == 0 || len(a.Scores) == 0 {
				t.Errorf("%s: %+v", file, a)
			}
		}
	}
}

func told(t *testing.T, file string, scores []cluster.Score, total float64) {
	t.Helper()
	for _, s := range scores {
		if total -= s.Score; s.Scorer == "" || len(s.Figures) == 0 || s.Score < 0 || s.Score > s.Max*(1+1e-12) {
			t.Errorf("%s: %+v", file, s)
		}
	}
	if total > 1e-9 || total < -1e-9 {
		t.Errorf("%s: the scores leave %v of the total", file, total)
	}
}

// FuzzDecide: whatever is read is decided on, printed both ways, and decided on alike again.
func FuzzDecide(f *testing.F) {
	files, _ := filepath.Glob("testdata/cases/*.yaml")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := snapfile.Parse(text)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Fatal("an error without words")
			}
			return
		}
		if large(s) {
			return // it takes long, which is another matter
		}
		var out [2]bytes.Buffer
		for i := range out {
			d, err := scheduler.Decide(s)
			if err != nil {
				return
			}
			if err := scheduler.WriteJSON(&out[i], d); err != nil {
				t.Fatal(err)
			}
			if err := scheduler.WriteText(io.Discard, d); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(out[0].Bytes(), out[1].Bytes()) {
			t.Fatal("the same snapshot gave other bytes")
		}
	})
}

// large says whether a snapshot asks for more than a fuzzer has time for.
func large(s *cluster.Snapshot) bool {
	n := 0
	for _, m := range s.Models {
		if m.Replicas != nil {
			n += *m.Replicas
		}
	}
	for _, g := range s.Gangs {
		for _, m := range g.Members {
			n += m.Count
		}
	}
	for _, j := range s.Jobs {
		for _, t := range j.Tasks {
			n += t.Count
		}
	}
	for _, set := range s.Serving {
		if set.Replicas != nil {
			n += *set.Replicas
		}
		for _, r := range set.Roles {
			n += r.Replicas
		}
	}
	return n > 200
}
