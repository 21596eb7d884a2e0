package watch

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/outflowhq/outflow/internal/lab/must"
)

func TestCertificatesAreThoseOfBothSides(t *testing.T) {
	t.Parallel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	made := func(until time.Time) tls.Certificate {
		c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: until}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		must.Succeed(t, err)
		return tls.Certificate{Certificate: [][]byte{der}}
	}
	day := time.Date(2030, 1, 2, 0, 0, 0, 0, time.UTC)
	own, next := made(day), made(day.AddDate(0, 0, 1))
	settings := &tls.Config{Certificates: []tls.Certificate{own}}
	server := []*x509.Certificate{{NotAfter: day.AddDate(1, 0, 0)}}
	want := []Certificate{{"server", day.AddDate(1, 0, 0)}, {"client", day}}
	if got := Certificates(server, settings, nil); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	want[1].Until = day.AddDate(0, 0, 1)
	read := func() (tls.Certificate, error) { return next, nil }
	if got := Certificates(server, settings, read); !slices.Equal(got, want) {
		t.Errorf("read for each connection: %v, want %v", got, want)
	}
	if got := Certificates(nil, nil, nil); got != nil {
		t.Errorf("without TLS: %v", got)
	}
}
