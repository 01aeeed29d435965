package profiler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/registry"
	"github.com/headrace/headrace/internal/sidecar"
	"github.com/headrace/headrace/scheduler/profile"
)

// host is where engines that are started here listen.
const host = "127.0.0.1"

// drainMax is how long an engine may take for what is still in flight when it is stopped: nothing is.
const drainMax = 2 * time.Second

// Launcher starts engines from command templates on this machine, one after the other.
type Launcher struct {
	// Template is the one of a degree.
	Template     func(degree int) (*sidecar.Template, error)
	Model        string // what {model} is
	ModelName    string
	Python       string
	Env          []string
	GPUs         []string // an engine gets the first ones; none: they are not assigned
	Guard        []string // sidecar.Config's
	Output       io.Writer
	Logger       *slog.Logger
	StartTimeout time.Duration
}

// command expands the template for a free port.
func (l *Launcher) command(degree int) (*sidecar.Command, string, error) {
	port, err := sidecar.FreePort(host)
	if err != nil {
		return nil, "", err
	}
	v := &sidecar.Values{Model: l.Model, ModelName: l.ModelName, Host: host, Port: port, Role: "both", EngineID: "profile-" + strconv.Itoa(degree), Python: l.Python}
	if len(l.GPUs) > 0 {
		if degree > len(l.GPUs) {
			return nil, "", fmt.Errorf("it needs %d GPUs and there are %d: name more with --gpus, or leave it out of --tp", degree, len(l.GPUs))
		}
		v.GPUs = strings.Join(l.GPUs[:degree], ",")
	}
	t, err := l.Template(degree)
	if err != nil {
		return nil, "", err
	}
	c, err := t.Expand(v)
	if err != nil {
		return nil, "", err
	}
	if v.GPUs != "" {
		c.Env = append(c.Env, "CUDA_VISIBLE_DEVICES="+v.GPUs)
	}
	c.Env = append(c.Env, l.Env...)
	return c, net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// Start is Options.Start.
func (l *Launcher) Start(ctx context.Context, degree int) (*Running, error) {
	command, addr, err := l.command(degree)
	if err != nil {
		return nil, err
	}
	ready := make(chan registry.Worker, 1)
	ended := make(chan struct{})
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	began := time.Now()
	var died error
	go func() {
		defer close(ended)
		died = sidecar.Run(inner, sidecar.Config{
			Entry: registry.Worker{ID: "profile-" + strconv.Itoa(degree), Role: "both", Addr: addr}, Addr: addr, Command: command, Guard: l.Guard,
			StartTimeout: l.StartTimeout, DrainTimeout: drainMax, Output: l.Output, Logger: l.Logger, OnReady: func(w registry.Worker) { ready <- w },
		})
	}()
	stop := func() error {
		cancel()
		<-ended
		return nil // how it ended is Err's to say
	}
	select {
	case w := <-ready:
		e := profile.Engine{Model: w.Model, KVTokens: int64(w.Blocks) * int64(w.BlockTokens), BlockTokens: int(w.BlockTokens), ContextTokens: int(w.ContextTokens), StartMs: time.Since(began).Seconds() * 1e3}
		return &Running{Engine: e, URL: "http://" + addr, Died: ended, Err: func() error { return died }, Stop: stop}, nil
	case <-ended:
		cancel()
		return nil, died
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), stop())
	}
}

// Find is Options.Start for an engine that runs already.
func Find(base string, client *http.Client) func(ctx context.Context, degree int) (*Running, error) {
	return func(ctx context.Context, _ int) (*Running, error) {
		self, err := (&sidecar.Asker{Base: base, Client: client}).Self(ctx)
		if err != nil {
			if e := (*url.Error)(nil); errors.As(err, &e) {
				err = e.Err
			}
			return nil, fmt.Errorf("no engine answers at %s: %w; start it, or have one started (--engine, --command, --standin, --model)", base, err)
		}
		e := profile.Engine{Model: self.Model, KVTokens: int64(self.Blocks) * int64(self.BlockTokens), BlockTokens: int(self.BlockTokens), ContextTokens: int(self.ContextTokens)}
		return &Running{Engine: e, URL: base, Stop: func() error { return nil }}, nil
	}
}
