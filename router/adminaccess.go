package router

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/headrace/headrace/internal/clusterauth"
)

// The admin listener is for this host. A browser on it can be led there by a page whose name resolves to 127.0.0.1 a moment later (DNS
// rebinding); it then asks under that name. So names that nobody has allowed are refused; an address cannot be rebound.
// Where other hosts reach the listener, they show that they hold the cluster's key.

// guarded lets those requests through that may be answered.
func (r *Router) guarded(next http.Handler) http.Handler {
	names := map[string]bool{}
	for _, name := range r.cfg.AdminHosts {
		names[plainHost(name)] = true
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !knownHost(req, names) {
			r.adminRefused.WithLabelValues("host").Inc()
			http.Error(w, fmt.Sprintf("This listener does not answer to the name %q: ask by address or as localhost, or start the router with --admin-host %[1]s.", plainHost(req.Host)), http.StatusMisdirectedRequest)
			return
		}
		if err := r.mayAdmin(req); err != nil {
			r.adminRefused.WithLabelValues("key").Inc()
			w.Header().Set("WWW-Authenticate", "Headrace-Cluster")
			http.Error(w, fmt.Sprintf("%s. From other hosts the admin address asks for it: give --cluster-key-file with the file that the routers have, or start the router with --admin-open.", err), http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// plainHost is a host as it is compared: without its port, in lower case.
func plainHost(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// knownHost tells whether a request asks for an address, for localhost (RFC 6761: resolvers do not ask anybody for it) or for a name that is
// allowed.
func knownHost(req *http.Request, names map[string]bool) bool {
	host := plainHost(req.Host)
	if host == "" {
		return !req.ProtoAtLeast(1, 1) // no browser's
	}
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || names[host] || net.ParseIP(host) != nil
}

// mayAdmin says why somebody from another host is not answered. Probes of health are; /metrics ask for what they ask for at the public
// address.
func (r *Router) mayAdmin(req *http.Request) error {
	if r.cfg.AdminOpen || req.URL.Path == "/healthz" || fromHere(req.RemoteAddr) {
		return nil
	}
	err := clusterauth.Check(req, r.cfg.ClusterKey, time.Now())
	if errors.Is(err, clusterauth.ErrMissing) && req.URL.Path == "/metrics" {
		if _, ok := r.keys.ring.Load().admits([]byte(req.Header.Get("Authorization"))); ok {
			return nil
		}
	}
	return err
}

// fromHere tells whether a connection comes over loopback.
func fromHere(remote string) bool {
	host, _, err := net.SplitHostPort(remote)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}
