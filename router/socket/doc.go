// Package socket reads and writes TCP connections without telling Go's scheduler of each system call. The calls do not wait, the
// sockets being non-blocking, but under load they last so long that the scheduler takes them for such as do: it hands their
// processor to another thread, wakes that up, and looks every 20 us whether there is more to do of that kind.
package socket
