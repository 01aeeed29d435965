package doctor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/headrace/headrace/transfer"
)

// examsMax bounds examinations of a host without a daemon.
const examsMax = 2

// Listen answers examinations where no node daemon runs, until ctx ends. It closes the listener.
func (x *Examiner) Listen(ctx context.Context, l net.Listener, key []byte, log *slog.Logger) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	defer l.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	places := make(chan struct{}, examsMax)
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("wait for examinations: %w", err)
		}
		select {
		case places <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-places }()
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
			conn.SetDeadline(time.Now().Add(dialWait))
			caller, err := transfer.AcceptExam(conn, key, nodeID(x.Host), nil)
			if err == nil {
				log.Info("being examined", "by", caller, "from", conn.RemoteAddr().String())
				err = x.Serve(ctx, conn)
			}
			if err != nil && !errors.Is(err, context.Canceled) {
				log.Warn("examination ended early", "from", conn.RemoteAddr().String(), "error", err)
			}
		})
	}
}
