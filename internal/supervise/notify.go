package supervise

import (
	"fmt"
	"net"
	"os"
)

// NotifySystemd tells systemd, if it started this process (Type=notify, NotifyAccess=all), that pid is the service's main
// process now and serves.
func NotifySystemd(pid int) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' {
		path = "\x00" + path[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "MAINPID=%d\nREADY=1\n", pid); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
