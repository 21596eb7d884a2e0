package watch

import (
	"crypto/tls"
	"crypto/x509"
	"time"
)

// Certificate is one that a connection depends on.
type Certificate struct {
	Side  string    `json:"side"` // server, or client: ours
	Until time.Time `json:"until"`
}

// Certificates returns those of a connection: what the server has shown, and what it was shown by these
// settings, or by client, where that is set.
func Certificates(server []*x509.Certificate, settings *tls.Config,
	client func() (tls.Certificate, error)) (all []Certificate) {
	if len(server) > 0 {
		all = append(all, Certificate{"server", server[0].NotAfter})
	}
	var own tls.Certificate
	if settings != nil && len(settings.Certificates) > 0 {
		own = settings.Certificates[0]
	}
	if client != nil {
		if c, err := client(); err == nil { // else the next connection says so
			own = c
		}
	}
	if len(own.Certificate) > 0 {
		if c, err := x509.ParseCertificate(own.Certificate[0]); err == nil {
			all = append(all, Certificate{"client", c.NotAfter})
		}
	}
	return all
}
