package routerbench

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/headrace/headrace/bench"
	"github.com/headrace/headrace/bench/child"
)

//go:embed peers
var embedded embed.FS

// Names of contestants.
const (
	ours       = "headrace"
	direct     = "direct"
	nginx      = "nginx"
	haproxy    = "haproxy"
	sglang     = "sglang-router"
	sglangBare = "sglang-router random"
	oursPairs  = "headrace pairs"
	oursNixl   = "headrace pairs nixl"
	sglangPair = "sglang-router pd"
	before     = "headrace of " // another binary's, whose name follows
)

// contestant is something to send requests to.
type contestant struct {
	name, what, addr string
	pairs            bool // two legs a request
	exact            bool // only asked for what exact routing is measured with
	group            int  // of its processes; 0: it has none
}

// freePort is one that was free a moment ago.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// program is one of somebody else's. It ends by an interrupt.
type program struct{ cmd *exec.Cmd }

func (p *program) Group() int { return p.cmd.Process.Pid }

func (p *program) Stop(patience time.Duration) error {
	_ = p.cmd.Process.Signal(os.Interrupt)
	kill := time.AfterFunc(patience, func() { _ = p.cmd.Cancel() })
	defer kill.Stop()
	_ = p.cmd.Wait() // by that signal, well or not
	return nil
}

// start runs a program and waits until it accepts connections at addr.
func (s *session) start(ctx context.Context, addr string, env []string, argv ...string) error {
	cmd := child.OwnGroup(exec.CommandContext(ctx, argv[0], argv[1:]...))
	cmd.Env = append(os.Environ(), env...)
	cmd.Dir = s.dir
	log, err := os.Create(filepath.Join(s.dir, filepath.Base(argv[0])+"-"+strings.ReplaceAll(addr, ":", "-")+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	s.processes = append(s.processes, &program{cmd})
	for deadline := time.Now().Add(startTimeout); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			return c.Close()
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			text, _ := os.ReadFile(log.Name())
			return errors.Join(err, fmt.Errorf("it said %q", child.LastLine(string(text))))
		}
	}
}

// nginxConf has what people set for a proxy of streams: no buffering, connections kept, no access log.
const nginxConf = `worker_processes auto; pid %[1]s/nginx.pid; error_log %[1]s/nginx.err warn; daemon off;
events { worker_connections 4096; multi_accept on; }
http { access_log off; keepalive_requests 100000000; keepalive_timeout 300s; client_max_body_size 64m; client_body_buffer_size 2m; tcp_nodelay on;
 client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
 upstream be { least_conn; server %[3]s; server %[4]s; keepalive 128; keepalive_requests 100000000; }
 server { listen %[2]s; location / { proxy_pass http://be; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } } }
`

func (s *session) startNginx(ctx context.Context, addr string) error {
	path, err := exec.LookPath("nginx")
	if err != nil {
		if path = "/usr/sbin/nginx"; !exists(path) {
			return errors.New("it is not installed (scripts/deps.sh bench)")
		}
	}
	conf := filepath.Join(s.dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConf, s.dir, addr, s.backends[0], s.backends[1]), 0o600); err != nil {
		return err
	}
	return s.start(ctx, addr, nil, path, "-c", conf, "-e", filepath.Join(s.dir, "nginx.err"))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

const haproxyConf = `global
  maxconn 4096
  nbthread %[1]d
  tune.bufsize 32768
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
  option http-keep-alive
  option http-no-delay
frontend f
  bind %[2]s
  default_backend b
backend b
  balance leastconn
  server s1 %[3]s
  server s2 %[4]s
`

func (s *session) startHAProxy(ctx context.Context, addr string) error {
	path, err := exec.LookPath("haproxy")
	if err != nil {
		if path = "/usr/sbin/haproxy"; !exists(path) {
			return errors.New("it is not installed (scripts/deps.sh bench)")
		}
	}
	conf := filepath.Join(s.dir, "haproxy.cfg")
	if err := os.WriteFile(conf, fmt.Appendf(nil, haproxyConf, s.report.Machine.CPUs, addr, s.backends[0], s.backends[1]), 0o600); err != nil {
		return err
	}
	return s.start(ctx, addr, nil, path, "-db", "-f", conf)
}

// python gives the Python that has sglang-router.
func (s *session) python(ctx context.Context) (string, error) {
	lock, err := embedded.ReadFile("peers/requirements.txt")
	if err != nil {
		return "", err
	}
	return bench.Venv(ctx, lock, s.o.Progress)
}

// offline keeps it from looking for models on the net.
var offline = []string{"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:1", "HTTPS_PROXY=http://127.0.0.1:1", "https_proxy=http://127.0.0.1:1", "NO_PROXY=127.0.0.1,localhost"}

func (s *session) startSGLang(ctx context.Context, addr, policy string, pairs bool) error {
	python, err := s.python(ctx)
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(addr)
	metrics, err := freePort()
	if err != nil {
		return err
	}
	argv := []string{python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port, "--log-level", "warn", "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics, "--policy", policy}
	if pairs {
		argv = append(argv, "--pd-disaggregation", "--prefill", "http://"+s.backends[0], "9190", "--decode", "http://"+s.backends[1])
	} else {
		argv = append(argv, "--worker-urls", "http://"+s.backends[0], "http://"+s.backends[1])
	}
	if err := s.start(ctx, addr, offline, argv...); err != nil {
		return err
	}
	return s.awaitReady(ctx, addr)
}

// awaitReady waits until a router has found its workers.
func (s *session) awaitReady(ctx context.Context, addr string) error {
	body := bodyOf(shape{kind: kindJSON, body: 1024}, 0)
	for deadline := time.Now().Add(startTimeout); ; {
		resp, err := http.Post("http://"+addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("it answers %s", resp.Status)
		}
		if time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
