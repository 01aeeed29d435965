package worker

import (
	"context"

	"github.com/headrace/headrace/worker/api"
)

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
	return s.Run(ctx, w.cfg.Listener, func() {
		w.cfg.Logger.Info("worker serves", "url", "http://"+w.cfg.Listener.Addr().String()+"/v1", "role", w.cfg.Role, "model", w.cfg.ModelName)
		if w.cfg.OnReady != nil {
			w.cfg.OnReady(w.info())
		}
	})
}
