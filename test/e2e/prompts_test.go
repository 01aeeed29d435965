package e2e

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// vocabulary bounds the token ids of prompts: below it every id of the tiny model is an ordinary one, and of SmolLM2
// all but the first few are.
const (
	vocabularyFirst = 32
	vocabularyEnd   = 250
)

var promptSeed atomic.Uint64

// freshPrompt is a prompt that no request had before: nothing of it is in a prefix cache.
func freshPrompt(n int) []int32 { return seededPrompt(1<<32+promptSeed.Add(1), n) }

// seededPrompt is n token ids that depend on the seed alone.
func seededPrompt(seed uint64, n int) []int32 {
	rng := rand.New(rand.NewPCG(seed, 7))
	out := make([]int32, n)
	for i := range out {
		out[i] = vocabularyFirst + rng.Int32N(vocabularyEnd-vocabularyFirst)
	}
	return out
}

// oracles are workers that serve whole requests, without a daemon, a router or a peer: one a model file.
var oracles = &oracleSet{byModel: map[string]*oracle{}}

type oracleSet struct {
	mu      sync.Mutex
	byModel map[string]*oracle
}

// oracle answers what is right. It is asked once for each request.
type oracle struct {
	url  string
	cmd  *exec.Cmd
	mu   sync.Mutex
	seen map[string]*answer
}

// oracleFor starts the reference of a model, once a run.
func oracleFor(t testing.TB, model string) *oracle {
	t.Helper()
	oracles.mu.Lock()
	defer oracles.mu.Unlock()
	if o := oracles.byModel[model]; o != nil {
		return o
	}
	o, err := startOracle(bin(t), model, filepath.Join(scratch, fmt.Sprintf("oracle%d", len(oracles.byModel))))
	if err != nil {
		t.Fatal(err)
	}
	oracles.byModel[model] = o
	return o
}

func (s *oracleSet) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.byModel {
		_ = o.cmd.Process.Kill()
		_ = o.cmd.Wait()
	}
}

// want is the right answer: the same engine run whole.
func (o *oracle) want(t testing.TB, r request) *answer {
	t.Helper()
	r.Stream = false
	key := r.path() + string(r.body())
	o.mu.Lock()
	defer o.mu.Unlock()
	if a := o.seen[key]; a != nil {
		return a
	}
	a := ask(o.url, r)
	if a.Error != nil || a.Broken != nil || !a.Done {
		t.Fatalf("the reference did not answer: %s", a.outcome())
	}
	if !r.MayEnd && len(r.Stop) == 0 && len(a.Tokens) != r.MaxTokens {
		t.Fatalf("the reference gave %d tokens, want %d", len(a.Tokens), r.MaxTokens)
	}
	o.seen[key] = a
	return a
}
