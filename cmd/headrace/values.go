package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Values of flags that are judged when they are read, from wherever: what cannot be is said before anything is opened or asked.

// checked is the value of a flag whose text has a form.
type checked struct {
	to    *string
	kind  string
	check func(text string) error
}

func (c *checked) Set(text string) error {
	if text != "" {
		if err := c.check(text); err != nil {
			return err
		}
	}
	*c.to = text
	return nil
}

func (c *checked) String() string {
	if c.to == nil { // pflag asks a zero value whether the default is worth showing
		return ""
	}
	return *c.to
}

func (c *checked) Type() string { return c.kind }

// addListen is for addresses that are listened on.
func addListen(fs *pflag.FlagSet, to *string, name, def, usage string) {
	*to = def
	fs.Var(&checked{to, "address", checkListen}, name, usage)
}

// addPeer is for addresses that somebody connects to.
func addPeer(fs *pflag.FlagSet, to *string, name, usage string) {
	fs.Var(&checked{to, "peer", checkPeer}, name, usage)
}

// errAddress is what any address must be.
var errAddress = errors.New("use HOST:PORT")

func checkListen(addr string) error {
	if strings.HasPrefix(addr, "fd:") { // of a supervisor
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return errAddress
	}
	if _, err := net.LookupPort("tcp", port); err != nil { // in a file, not in the network
		return fmt.Errorf("%w: %q is no port", errAddress, port)
	}
	return nil
}

func checkPeer(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return errAddress
	}
	if n, err := net.LookupPort("tcp", port); err != nil || n == 0 {
		return fmt.Errorf("%w: %q is no port that can be connected to", errAddress, port)
	}
	return nil
}

// endpoints is the value of --etcd. What is given again is added, as pflag's own slices do.
type endpoints struct {
	to    *[]string
	given bool
}

func addEtcd(fs *pflag.FlagSet, to *[]string, usage string) {
	fs.Var(&endpoints{to: to}, "etcd", usage)
}

func (e *endpoints) Set(text string) error {
	var list []string
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		if item == "" && text == "" {
			break // --etcd= is for none
		}
		if err := checkEndpoint(item); err != nil {
			return fmt.Errorf("endpoint %q: %w", item, err)
		}
		list = append(list, item)
	}
	if e.given {
		list = append(*e.to, list...)
	}
	*e.to, e.given = list, true
	return nil
}

func checkEndpoint(text string) error {
	if scheme, rest, ok := strings.Cut(text, "://"); ok {
		switch scheme {
		case "http", "https":
			u, err := url.Parse(text)
			if err != nil {
				return errAddress
			}
			return checkPeer(u.Host)
		case "unix", "unixs":
			if rest != "" {
				return nil
			}
		}
		return errAddress
	}
	return checkPeer(text)
}

func (e *endpoints) String() string {
	if e.to == nil {
		return ""
	}
	return strings.Join(*e.to, ",")
}

func (e *endpoints) Type() string { return "endpoints" }

// checkThere finds that what an option names is not there; "" is right.
func checkThere(flag, path string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return nil
}

// checkFolder finds that there is no such folder.
func checkFolder(flag, path string) error {
	if err := checkThere(flag, path); err != nil || path == "" {
		return err
	}
	if info, err := os.Stat(path); err == nil && !info.IsDir() {
		return fmt.Errorf("--%s %s: it is no folder", flag, path)
	}
	return nil
}

// checkFolderOf finds that a file could not be written for want of its folder.
func checkFolderOf(flag, file string) error {
	if file == "" {
		return nil
	}
	return checkFolder(flag, filepath.Dir(file))
}

// span is a time that cannot be negative.
type span time.Duration

func addSpan(fs *pflag.FlagSet, to *time.Duration, name string, def time.Duration, usage string) {
	*to = def
	fs.Var((*span)(to), name, usage)
}

func (s *span) Set(text string) error {
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return errors.New("use a time as 500ms, 30s or 5m")
	case d < 0:
		return errors.New("a time cannot be negative")
	}
	*s = span(d)
	return nil
}

func (s *span) String() string {
	if *s == 0 {
		return "0"
	}
	return time.Duration(*s).String()
}

func (s *span) Type() string { return "duration" }
