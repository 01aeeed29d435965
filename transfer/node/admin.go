package node

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/telemetry"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// admin is the operators' HTTP server.
type admin struct {
	srv      *http.Server
	listener net.Listener
	addr     string
	done     chan error
}

// startAdmin serves on l, or on the configured address when that is nil.
func (s *server) startAdmin(l net.Listener) (*admin, error) {
	if s.cfg.Admin == "" {
		return nil, nil
	}
	if l == nil {
		var err error
		if l, err = net.Listen("tcp", s.cfg.Admin); err != nil {
			return nil, fmt.Errorf("listen for admin HTTP: %w", err)
		}
	}
	return s.serveAdmin(l), nil
}

func (s *server) serveAdmin(l net.Listener) *admin {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, s.status()) })
	mux.HandleFunc("GET /debug/leases/{ticket}", s.leaseCourses)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics.registry(s), promhttp.HandlerOpts{}))
	if s.cfg.Debug {
		s.addDebug(mux)
	}
	a := &admin{listener: l, addr: l.Addr().String(), done: make(chan error, 1), srv: &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}}
	go func() { a.done <- a.srv.Serve(l) }()
	return a
}

// Status is what /status shows: the data plane's, and who is draining beside this daemon.
type Status struct {
	transfer.Status
	PID   int    `json:"pid"`
	Build string `json:"build,omitempty"`
	// Telemetry says what is measured from outside, how, and why so.
	Telemetry   telemetry.Status `json:"telemetry"`
	Predecessor *Predecessor     `json:"predecessor,omitempty"` // drains, after its hand-over to this daemon
}

func (s *server) status() Status {
	return Status{Status: s.snapshot(), PID: os.Getpid(), Build: s.cfg.Build, Telemetry: s.tel.Status(), Predecessor: s.before.Load()}
}

// leaseCourses answers with what happened to the leases of a ticket, which is named by its nonce in hex.
func (s *server) leaseCourses(w http.ResponseWriter, r *http.Request) {
	b, err := hex.DecodeString(r.PathValue("ticket"))
	if err != nil || len(b) != 16 {
		http.Error(w, "a ticket's nonce is 32 hex digits", http.StatusBadRequest)
		return
	}
	list := s.eng.Courses([16]byte(b))
	if len(list) == 0 {
		http.Error(w, "no lease of this ticket is remembered: it was never presented here, or others ended since", http.StatusNotFound)
		return
	}
	writeJSON(w, list)
}

func (a *admin) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := a.srv.Shutdown(ctx)
	if err != nil {
		err = a.srv.Close()
	}
	if served := <-a.done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (s *server) healthz(w http.ResponseWriter, _ *http.Request) {
	if s.ctx.Err() != nil {
		http.Error(w, "stopping", http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// addDebug adds what lets a test hold a transfer in its middle. It is off unless asked for: it can stall every engine.
func (s *server) addDebug(mux *http.ServeMux) {
	point := func(w http.ResponseWriter, r *http.Request) (string, bool) {
		name := r.FormValue("point")
		if !slices.Contains(transfer.PausePoints(), name) {
			http.Error(w, fmt.Sprintf("no pause point %q: there are %v", name, transfer.PausePoints()), http.StatusBadRequest)
			return "", false
		}
		return name, true
	}
	mux.HandleFunc("POST /debug/pause", func(w http.ResponseWriter, r *http.Request) {
		name, ok := point(w, r)
		if !ok {
			return
		}
		after := 0
		if v := r.FormValue("after"); v != "" {
			n, err := strconv.Atoi(v)
			if err != nil || n < 0 {
				http.Error(w, fmt.Sprintf("after=%q is no count", v), http.StatusBadRequest)
				return
			}
			after = n
		}
		s.eng.Pauses().Set(name, after)
		writeJSON(w, s.eng.Pauses().Snapshot())
	})
	mux.HandleFunc("POST /debug/release", func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("point") == "" {
			s.eng.Pauses().ReleaseAll()
		} else if name, ok := point(w, r); ok {
			s.eng.Pauses().Release(name)
		} else {
			return
		}
		writeJSON(w, s.eng.Pauses().Snapshot())
	})
	mux.HandleFunc("GET /debug/pauses", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, s.eng.Pauses().Snapshot()) })
	mux.HandleFunc("POST /debug/rate", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.FormValue("bytes_per_s"), 10, 64)
		if err != nil || n < 0 {
			http.Error(w, "bytes_per_s must be a number, 0 for no limit", http.StatusBadRequest)
			return
		}
		s.eng.SetRate(n)
		writeJSON(w, map[string]int64{"bytes_per_s": s.eng.Rate()})
	})
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}
