package api

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headrace/headrace/internal/chat"
	"github.com/headrace/headrace/internal/openai"
	"github.com/headrace/headrace/worker/tokenizer"
)

// Tokenizer is what the server needs of one; *tokenizer.Tokenizer is one.
type Tokenizer interface {
	openai.Vocab
	Encode(dst []int32, text string, o tokenizer.EncodeOptions) ([]int32, error)
	Decode(dst []byte, ids []int32, keepSpecial bool) []byte
	// TokenBytesMax bounds the text of a token from above.
	TokenBytesMax() int
}

// Template renders chats; *chat.Template is one.
type Template interface {
	Render(in chat.Input) (string, error)
}

// Config is what a Server is made of. Engine and Tokenizer are needed, the rest has defaults.
type Config struct {
	Engine    Engine
	Tokenizer Tokenizer
	Chat      Template // nil: the model has no chat template, chats are refused
	Logger    *slog.Logger

	BodyBytesMax int64         // of a request; 16 MiB
	InFlightMax  int           // generating requests at once, waiting ones included; 1024
	Heartbeat    time.Duration // of the native dialect; 500 ms
	ReadTimeout  time.Duration // for a request's header, and again for its body; 20 s
	WriteTimeout time.Duration // for a client to take what is written; 30 s
	IdleTimeout  time.Duration // between requests of a connection; 120 s
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.BodyBytesMax <= 0 {
		c.BodyBytesMax = 16 << 20
	}
	if c.InFlightMax <= 0 {
		c.InFlightMax = 1024
	}
	for _, d := range []struct {
		at  *time.Duration
		def time.Duration
	}{
		{&c.Heartbeat, 500 * time.Millisecond},
		{&c.ReadTimeout, 20 * time.Second},
		{&c.WriteTimeout, 30 * time.Second},
		{&c.IdleTimeout, 120 * time.Second},
	} {
		if *d.at <= 0 {
			*d.at = d.def
		}
	}
	return c
}

// Server answers HTTP for one engine.
type Server struct {
	cfg      Config
	model    ModelInfo
	ends     map[int32]bool
	http     *http.Server
	metrics  *metrics
	inFlight atomic.Int64
	pumps    sync.WaitGroup
}

// New makes a Server.
func New(c Config) (*Server, error) {
	if c.Engine == nil || c.Tokenizer == nil {
		return nil, errors.New("make server: it needs an engine and a tokenizer")
	}
	s := &Server{cfg: c.withDefaults(), model: c.Engine.Model(), ends: map[int32]bool{}}
	for _, id := range s.model.EndTokens {
		s.ends[id] = true
	}
	s.metrics = newMetrics(c.Engine, s.model)
	s.http = &http.Server{
		Handler:           s.routes(),
		ReadHeaderTimeout: s.cfg.ReadTimeout,
		IdleTimeout:       s.cfg.IdleTimeout,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s, nil
}

// drainMax is how long requests may go on once Run's context has ended: the router has drained before, so what is left belongs
// to somebody who did not ask it.
const drainMax = 2 * time.Second

// Run answers on a listener until ctx ends, and a little longer what is under way, or until the listener breaks. It calls ready,
// where there is one, once it serves.
func (s *Server) Run(ctx context.Context, l net.Listener, ready func()) error {
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	if ready != nil {
		ready()
	}
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainMax)
	defer cancel()
	err := s.Shutdown(drain)
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // what did not end in time was cut off, which is what was announced
	}
	return errors.Join(err, <-served)
}

// Serve answers on a listener until Shutdown. TCP connections have TCP_NODELAY set: Go does that by itself, and a test
// holds it, because a stream without it stalls for 40 ms a token.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Shutdown stops taking requests and waits for the running ones until ctx ends, then cuts them off. When it returns
// without an error the engine has closed every channel.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = errors.Join(err, s.http.Close())
		return err
	}
	done := make(chan struct{})
	go func() { s.pumps.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { s.generate(w, r, openai.Chat) })
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) { s.generate(w, r, openai.Completions) })
	mux.HandleFunc("GET /v1/models", s.listModels)
	mux.HandleFunc("GET /v1/models/{id...}", s.oneModel)
	mux.HandleFunc("POST /tokenize", s.tokenize)
	mux.HandleFunc("POST /detokenize", s.detokenize)
	mux.HandleFunc("POST "+openai.PathMove, s.move)
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /status", s.status)
	mux.Handle("GET /metrics", s.metrics.handler())
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", openai.PathMove, "/v1/models", "/health", "/status", "/metrics"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			writeError(w, openai.MethodNotAllowed(r.Method, r.URL.Path))
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, openai.NotFound(r.Method, r.URL.Path))
	})
	return s.recovering(mux)
}

// recovering turns a panic into a 500, or into a cut connection when the answer has begun: the client must not take
// what it has for all there is.
func (s *Server) recovering(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tw := &trackingWriter{ResponseWriter: w}
		// The deadline of the connection's last request may have passed.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(bodyWriteTimeout))
		defer func() {
			p := recover()
			if p == nil {
				return
			}
			if p == http.ErrAbortHandler {
				panic(p)
			}
			s.cfg.Logger.Error("handler panicked", "path", r.URL.Path, "panic", p, "stack", string(debug.Stack()))
			if tw.wrote {
				panic(http.ErrAbortHandler)
			}
			writeError(w, openai.Internal("The server had an error while processing your request."))
		}()
		next.ServeHTTP(tw, r)
	})
}

type trackingWriter struct {
	http.ResponseWriter
	wrote bool
}

func (t *trackingWriter) WriteHeader(status int) {
	t.wrote = true
	t.ResponseWriter.WriteHeader(status)
}

func (t *trackingWriter) Write(p []byte) (int, error) {
	t.wrote = true
	return t.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (t *trackingWriter) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// bodyWriteTimeout bounds the writing of an answer that is one body.
const bodyWriteTimeout = 30 * time.Second

func writeError(w http.ResponseWriter, e *openai.Error) {
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(max(1, e.RetryAfter/time.Second))))
	}
	writeJSON(w, e.Status, e.AppendJSON(nil))
}

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(bodyWriteTimeout)) // not every ResponseWriter has one
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that has left needs no answer
}

func (s *Server) names() []openai.Model {
	m := openai.Model{ID: s.model.ID, Created: s.model.Created.Unix(), ContextLen: s.model.Context}
	list := []openai.Model{m}
	for _, alias := range s.model.Aliases {
		m.ID = alias
		list = append(list, m)
	}
	return list
}

func (s *Server) listModels(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, openai.AppendModels(nil, s.names()))
}

func (s *Server) oneModel(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	for _, m := range s.names() {
		if m.ID == id {
			writeJSON(w, http.StatusOK, openai.AppendModel(nil, m))
			return
		}
	}
	writeError(w, openai.ModelNotFound(id))
}

// health asks the engine when it has something to say.
func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	if h, ok := s.cfg.Engine.(interface{ Health() error }); ok {
		if err := h.Health(); err != nil {
			writeError(w, openai.Unavailable("%v", err))
			return
		}
	}
	w.WriteHeader(http.StatusOK)
}

func (s *Server) status(w http.ResponseWriter, _ *http.Request) {
	body, err := json.Marshal(s.cfg.Engine.Status())
	if err != nil {
		writeError(w, openai.Internal("render status: %v", err))
		return
	}
	writeJSON(w, http.StatusOK, append(body, '\n'))
}
