package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// builder compiles each program once a run, one after the other in the order in which they were asked for. It takes what the
// machines leave of the processors, so that what a later scenario needs is there when its turn comes.
type builder struct {
	dir   string // for what it makes
	cache string // for what it fetches
	race  bool
	queue chan *job
	ended sync.WaitGroup
	end   context.CancelFunc

	mu    sync.Mutex      // guards what follows
	jobs  map[string]*job // by name of the file
	spent time.Duration   // that scenarios waited
}

// job is a program to be compiled.
type job struct {
	pkg, file string
	test      bool
	cgo       string        // CGO_ENABLED
	done      chan struct{} // closed when what follows stands
	dir       string        // the package's, of a test
	err       error
}

const (
	// jobsMax bounds the programs of a run.
	jobsMax = 1000
	// behind is the compiler's niceness: a machine has nine times its share of a processor.
	behind = 10
)

// newBuilder is to be closed.
func newBuilder(ctx context.Context, dir, cache string, race bool) *builder {
	b := &builder{dir: dir, cache: cache, race: race, jobs: make(map[string]*job), queue: make(chan *job, jobsMax)}
	ctx, b.end = context.WithCancel(ctx)
	b.ended.Go(func() {
		for {
			select {
			case j := <-b.queue:
				j.err = b.compile(ctx, j)
				close(j.done)
			case <-ctx.Done():
				return
			}
		}
	})
	return b
}

// close ends what is being compiled.
func (b *builder) close() {
	b.end()
	b.ended.Wait()
}

// want has all compiled that a scenario needs, and does not wait for it.
func (b *builder) want(s *scenario) {
	b.guest()
	if s.headrace {
		b.headrace()
	}
	for _, st := range s.steps {
		if st.test != "" {
			b.test(st.test)
		}
	}
}

// test is a package's tests.
func (b *builder) test(pkg string) *job {
	return b.job(job{pkg: pkg, file: testName(pkg), test: true, cgo: "1"})
}

func (b *builder) headrace() *job {
	return b.job(job{pkg: "./cmd/headrace", file: "headrace", cgo: "1"})
}

// guest is /init: it runs where no library is needed.
func (b *builder) guest() *job { return b.job(job{pkg: "./test/lab/guest", file: "guest", cgo: "0"}) }

func (b *builder) job(want job) *job {
	b.mu.Lock()
	defer b.mu.Unlock()
	j := b.jobs[want.file]
	if j == nil {
		j = &want
		j.file, j.done = filepath.Join(b.dir, j.file), make(chan struct{})
		b.jobs[want.file] = j
		b.queue <- j
	}
	return j
}

// wait waits until a program is there.
func (b *builder) wait(ctx context.Context, j *job) error {
	began := time.Now()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.spent += time.Since(began)
	}()
	select {
	case <-j.done:
		return j.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (b *builder) compile(ctx context.Context, j *job) error {
	args := []string{"build", "-o", j.file}
	if j.test {
		dir, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", j.pkg).Output()
		if err != nil {
			return fmt.Errorf("find package %s: %w", j.pkg, err)
		}
		j.dir = strings.TrimSpace(string(dir))
		args = []string{"test", "-c", "-o", j.file}
		if b.race {
			args = append(args, "-race")
		}
	}
	var said strings.Builder
	cmd := exec.CommandContext(ctx, "go", append(args, j.pkg)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+j.cgo)
	cmd.Stdout, cmd.Stderr = &said, &said
	err := cmd.Start()
	if err == nil {
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, behind) // its children inherit it
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(cmd.Args[1:], " "), err, said.String())
	}
	return nil
}
