package cgo

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

// object is something of libibverbs' that C knows by its address.
type object unsafe.Pointer

// Device is an open device. Its methods may be called from any goroutine.
type Device struct {
	Name string
	c    object
}

// Open opens a device by its name.
func Open(name string) (*Device, error) {
	c, errno := cOpen(name)
	if errno != 0 {
		return nil, fail(errno, "open RDMA device %s", name)
	}
	return &Device{Name: name, c: c}, nil
}

// Close closes the device; everything that was made of it must be closed before.
func (d *Device) Close() error { return release(&d.c, cClose, "close RDMA device "+d.Name) }

// release destroys an object once.
func release(c *object, destroy func(object) syscall.Errno, what string) error {
	if *c == nil {
		return nil
	}
	if errno := destroy(*c); errno != 0 {
		return fail(errno, "%s", what)
	}
	*c = nil
	return nil
}

// Attr says what the device can do.
func (d *Device) Attr() (a DeviceAttr, err error) {
	err = fail(cQueryDevice(d.c, &a), "query device %s", d.Name)
	return a, err
}

// Port gives the state of a port; the first is 1.
func (d *Device) Port(port int) (a PortAttr, err error) {
	err = fail(cQueryPort(d.c, port, &a), "query port %d of %s", port, d.Name)
	return a, err
}

// PKey gives an entry of a port's table of partition keys.
func (d *Device) PKey(port, index int) (uint16, error) {
	k, errno := cQueryPKey(d.c, port, index)
	return k, fail(errno, "query P_Key %d of port %d of %s", index, port, d.Name)
}

// GIDTable lists the addresses of a port that are in use.
func (d *Device) GIDTable(port int) ([]GID, error) {
	attr, err := d.Port(port)
	if err != nil {
		return nil, err
	}
	var table []GID
	for i := range int(attr.GIDs) {
		var g GID
		switch errno := cQueryGID(d.c, port, i, &g); errno {
		case 0:
		case syscall.ENOSYS, syscall.EOPNOTSUPP: // an older library or kernel: the kernel's files say the same
			if g, err = gidFromSysfs("/sys/class/infiniband", d.Name, port, i); err != nil {
				continue
			}
		case syscall.ENODATA, syscall.EINVAL:
			continue // a hole in the table
		default:
			return nil, fail(errno, "query GID %d of port %d of %s", i, port, d.Name)
		}
		if g.Addr != ([16]byte{}) {
			table = append(table, g)
		}
	}
	return table, nil
}

// gidFromSysfs reads one entry of a port's GID table from the kernel's files.
func gidFromSysfs(root, device string, port, index int) (g GID, err error) {
	dir, name := filepath.Join(root, device, "ports", strconv.Itoa(port)), strconv.Itoa(index)
	b, err := os.ReadFile(filepath.Join(dir, "gids", name))
	if err != nil {
		return g, err
	}
	hex := strings.ReplaceAll(strings.TrimSpace(string(b)), ":", "")
	if len(hex) != 32 {
		return g, fmt.Errorf("GID %d of port %d of %s reads %q", index, port, device, b)
	}
	for i := range g.Addr {
		v, err := strconv.ParseUint(hex[2*i:2*i+2], 16, 8)
		if err != nil {
			return g, fmt.Errorf("GID %d of port %d of %s reads %q: %w", index, port, device, b, err)
		}
		g.Addr[i] = byte(v)
	}
	g.Index, g.Port = uint32(index), uint32(port)
	if b, err := os.ReadFile(filepath.Join(dir, "gid_attrs", "types", name)); err == nil {
		switch strings.TrimSpace(string(b)) {
		case "RoCE v2":
			g.Type = GIDRoCEv2
		case "IB/RoCE v1", "RoCE v1":
			g.Type = GIDRoCEv1
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "gid_attrs", "ndevs", name)); err == nil {
		if b, err := os.ReadFile(filepath.Join("/sys/class/net", strings.TrimSpace(string(b)), "ifindex")); err == nil {
			n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
			g.IfIndex = uint32(n)
		}
	}
	return g, nil
}

// AsyncFD is the nonblocking descriptor that becomes readable when there is an event. It belongs to the device.
func (d *Device) AsyncFD() (int, error) {
	fd := cAsyncFD(d.c)
	if fd < 0 {
		return -1, fail(syscall.EBADF, "prepare the events of %s", d.Name)
	}
	return fd, nil
}

// AsyncEvent takes the next event; EAGAIN where there is none.
func (d *Device) AsyncEvent() (e AsyncEvent, err error) {
	err = fail(cAsyncEvent(d.c, &e), "read an event of %s", d.Name)
	return e, err
}

// PD is a protection domain: what memory and queue pairs must have in common.
type PD struct {
	dev *Device
	c   object
}

// NewPD makes a protection domain.
func (d *Device) NewPD() (*PD, error) {
	c, errno := cAllocPD(d.c)
	if errno != 0 {
		return nil, fail(errno, "make a protection domain on %s", d.Name)
	}
	return &PD{dev: d, c: c}, nil
}

// Close frees the domain.
func (p *PD) Close() error {
	return release(&p.c, cDeallocPD, "free a protection domain of "+p.dev.Name)
}

// MR is registered memory.
type MR struct {
	Keys
	dev *Device
	c   object
}

// Register registers mapped memory, which must not be the Go heap and must outlive the registration.
func (p *PD) Register(mem []byte, access Access) (*MR, error) {
	if len(mem) == 0 {
		return nil, fail(syscall.EINVAL, "register no memory with %s", p.dev.Name)
	}
	m := &MR{dev: p.dev}
	var errno syscall.Errno
	if m.c, errno = cRegMR(p.c, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), uint64(len(mem)), access, &m.Keys); errno != 0 {
		return nil, fail(errno, "register %d bytes with %s", len(mem), p.dev.Name)
	}
	return m, nil
}

// RegisterDMABuf registers length bytes at offset of a dma-buf. Work requests address them from iova on.
func (p *PD) RegisterDMABuf(fd int, offset, length, iova uint64, access Access) (*MR, error) {
	m := &MR{dev: p.dev}
	var errno syscall.Errno
	if m.c, errno = cRegDMABuf(p.c, offset, length, iova, fd, access, &m.Keys); errno != 0 {
		return nil, fail(errno, "register %d bytes of a dma-buf with %s", length, p.dev.Name)
	}
	return m, nil
}

// Close deregisters the memory.
func (m *MR) Close() error { return release(&m.c, cDeregMR, "deregister memory of "+m.dev.Name) }

// Window is a memory window of type 2: a right to registered memory that one queue pair can take back by itself.
type Window struct {
	RKey uint32 // of the last bind
	dev  *Device
	c    object
}

// NewWindow makes a window, bound to nothing.
func (p *PD) NewWindow() (*Window, error) {
	w := &Window{dev: p.dev}
	var errno syscall.Errno
	if w.c, w.RKey, errno = cAllocMW(p.c); errno != 0 {
		return nil, fail(errno, "make a memory window on %s", p.dev.Name)
	}
	return w, nil
}

// Close frees the window.
func (w *Window) Close() error {
	return release(&w.c, cDeallocMW, "free a memory window of "+w.dev.Name)
}

// Channel tells of completions by a descriptor.
type Channel struct {
	FD  int // nonblocking; belongs to the channel
	dev *Device
	c   object
}

// NewChannel makes a completion channel.
func (d *Device) NewChannel() (*Channel, error) {
	c, fd, errno := cCreateChannel(d.c)
	if errno != 0 {
		return nil, fail(errno, "make a completion channel on %s", d.Name)
	}
	return &Channel{FD: fd, dev: d, c: c}, nil
}

// Event takes one event; EAGAIN where there is none.
func (c *Channel) Event() syscall.Errno { return cChannelEvent(c.c) }

// Close frees the channel, after its completion queues.
func (c *Channel) Close() error {
	err := release(&c.c, cDestroyChannel, "free a completion channel of "+c.dev.Name)
	if err == nil {
		c.FD = -1
	}
	return err
}
