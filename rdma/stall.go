package rdma

import (
	"fmt"
	"time"
)

// A device completes a request or fails it: ackRetries times ackTimeout is half a second. Soft RoCE (Linux 6.1) was seen to do
// neither on a host short of processors, over interfaces with fq_codel, which drops what has waited for milliseconds there: it
// goes back in its send queue in one tasklet while another takes late acknowledgements from it, packets then go out under
// others' numbers, and the far end refuses them or answers none; and it retries without end. Such a lane is ended, and its
// pieces go to others. Where nothing is dropped, none was seen to fail.
const (
	stallLook = 250 * time.Millisecond
	stallEnd  = 5 * time.Second
)

// watchStalls looks after the lanes until the link closes.
func (l *link) watchStalls() {
	t := time.NewTicker(stallLook)
	defer t.Stop()
	for {
		select {
		case <-l.over:
			return
		case now := <-t.C:
			l.mu.RLock()
			for _, x := range l.lanes {
				if err := x.stalled(now); err != nil {
					x.fail(err)
				}
			}
			l.mu.RUnlock()
		}
	}
}

// stalled says that nothing has been completed for too long, though there is something under way.
func (x *lane) stalled(now time.Time) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failing || x.posted == x.completed || now.Sub(x.moved) < stallEnd {
		return nil
	}
	return fmt.Errorf("QP %d of %s has completed nothing for %v", x.qp.Num, x.rail.name, stallEnd)
}
