package torture

import (
	"net/url"
	"strings"
)

// proxyablePostgres tells whether a proxy can stand before a server: not where its certificate is checked
// against its name, and not before several hosts or a socket.
func proxyablePostgres(target string) bool {
	if target == "" {
		return true
	}
	u, err := url.Parse(target)
	return err == nil && u.Port() != "" && !strings.Contains(u.Host, ",") &&
		!strings.HasPrefix(u.Query().Get("sslmode"), "verify")
}

// proxyableNATS is the same for a list of servers.
func proxyableNATS(targets string) bool {
	for target := range strings.SplitSeq(targets, ",") {
		if target == "" {
			continue
		}
		if u, err := url.Parse(target); err != nil || u.Scheme != "nats" || u.Port() == "" {
			return false
		}
	}
	return true
}
