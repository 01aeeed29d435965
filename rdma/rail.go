package rdma

import (
	"errors"
	"fmt"
	"sync"

	"github.com/headrace/headrace/cgo"
)

// rail is a port of a device that carries traffic, with the device opened for it.
type rail struct {
	index   int // in the transport's list, which the other end names it by
	name    string
	port    int
	found   *port // as it was when the devices were looked for
	dev     *cgo.Device
	pd      *cgo.PD
	attr    cgo.DeviceAttr
	netdev  string // of a RoCE port
	numa    int    // -1 where the host does not say
	watcher *watcher
	soft    bool // a driver's own software
	windows windowPool

	mu       sync.Mutex // guards standing; a leaf
	standing standing
}

func (r *rail) String() string {
	s := r.now()
	return fmt.Sprintf("%s port %d (%s, %v, %d Mb/s, MTU %d, %v index %d)", r.name, r.port, r.netdev, s.state.LinkLayer, s.state.RateMbps(), s.state.ActiveMTU, s.gid.Type, s.gid.Index)
}

func (r *rail) close() error {
	var errs []error
	if r.watcher != nil {
		errs = append(errs, r.watcher.close())
	}
	errs = append(errs, r.windows.close())
	if r.pd != nil {
		errs = append(errs, r.pd.Close())
	}
	if r.dev != nil {
		errs = append(errs, r.dev.Close())
	}
	return errors.Join(errs...)
}
