package worker

import (
	"context"
	"errors"
	"time"

	"github.com/headrace/headrace/worker/api"
)

// drainMax is how long requests may go on after the worker was told to stop: the router has drained before, so what is
// left belongs to somebody who did not ask it.
const drainMax = 2 * time.Second

// serve answers HTTP until ctx ends or the listener breaks.
func (w *worker) serve(ctx context.Context) error {
	cfg := api.Config{Engine: w.engine, Tokenizer: w.tok, Logger: w.cfg.Logger, BodyBytesMax: w.cfg.BodyMax}
	if w.tmpl != nil {
		cfg.Chat = w.tmpl
	}
	s, err := api.New(cfg)
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(w.cfg.Listener) }()
	w.cfg.Logger.Info("worker serves", "url", "http://"+w.cfg.Listener.Addr().String()+"/v1", "role", w.cfg.Role, "model", w.cfg.ModelName)
	if w.cfg.OnReady != nil {
		w.cfg.OnReady(w.info())
	}
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainMax)
	defer cancel()
	err = s.Shutdown(drain)
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil // what did not end in time was cut off, which is what was announced
	}
	return errors.Join(err, <-served)
}
