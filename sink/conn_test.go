package sink

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/outflowhq/outflow/internal/lab/must"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/outbox"
)

// limitedUser gives a server the users all, who may do anything, and some, who may publish to the subjects
// given. The password of both is pass.
func limitedUser(publish ...string) func(*server.Options) {
	return func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "all", Password: "pass"}, {Username: "some", Password: "pass",
				Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: publish}}},
		}
	}
}

func userURL(s *natsserver.Server, user string) string {
	return strings.Replace(s.URL(), "://", "://"+user+":pass@", 1)
}

func TestOldVersionsOfNATSAreRefused(t *testing.T) {
	t.Parallel()
	for v, want := range map[string]bool{
		"2.10.22": false, "2.10.23": true, "2.9.30": false, "2.11.0": true, "3.0.0": true,
		"2.10.23-beta.1": true,
		"2.10":           false, "": false, "1.99.99": false, "x.y.z": false, "2.15.2": true,
	} {
		if got := atLeast(v, 2, 10, 23); got != want {
			t.Errorf("%q: %v", v, got)
		}
	}
}

func TestAServerThatIsTooOldIsNamed(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ =
			conn.Write(
				[]byte(
					`INFO {"server_id":"A","version":"2.10.22","proto":1,"headers":true,"max_payload":1048576}` + "\r\n"))
		b := make([]byte, 4096)
		for all := ""; !strings.Contains(all, "PING\r\n"); {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			all += string(b[:n])
		}
		_, _ = conn.Write([]byte("PONG\r\n"))
		_, _ = conn.Read(b)
	}()
	_, err = Connect(t.Context(), config("nats://"+listener.Addr().String()))
	if f := wantFault(t, err, outbox.Fatal, "nats_version"); !strings.Contains(f.Error(), "2.10.22") ||
		!strings.Contains(f.Hint, "2.10.23") {
		t.Error(f)
	}
}

func TestServerWithoutJetStream(t *testing.T) {
	t.Parallel()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true,
		NoSigs: true})
	must.Succeed(t, err)
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(3 * time.Minute) {
		t.Fatal("not ready")
	}
	_, err = Connect(t.Context(), config(s.ClientURL()))
	wantFault(t, err, outbox.Fatal, "nats_jetstream")
}

func TestConnectErrorsHoldNoSecrets(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: limitedUser(">")})
	address := strings.TrimPrefix(s.URL(), "nats://")
	missing := filepath.Join(t.TempDir(), "none")
	badContext := filepath.Join(t.TempDir(), "bad.json")
	must.Succeed(t, os.WriteFile(badContext, []byte(`{"url":"nats://me:hush7 pw@host:port"}`), 0o600))
	for _, test := range []struct {
		name   string
		change func(*Config)
		class  outbox.Class
		code   string
	}{
		{"wrong password in the URL", func(c *Config) { c.URL = "nats://all:hush7pw@" + address },
			outbox.Fatal, "nats_auth"},
		{"an @ in the password", func(c *Config) { c.URL = "nats://all:a@hush7pw@" + address }, outbox.Usage,
			"nats_url"},
		{"a slash in the password", func(c *Config) { c.URL = "nats://all:a/hush7pw@" + address },
			outbox.Usage, "nats_url"},
		{"wrong password", func(c *Config) { c.User, c.Password = "all", "hush7pw" }, outbox.Fatal,
			"nats_auth"},
		{"wrong token", func(c *Config) { c.Token = "hush7pw" }, outbox.Fatal, "nats_auth"},
		{"no credentials", func(*Config) {}, outbox.Fatal, "nats_auth"},
		{"nobody listens", func(c *Config) {
			c.URL = "nats://all:hush7pw@127.0.0.1:1,nats://hush7pw@127.0.0.1:2"
		}, outbox.Transient, "nats_connect"},
		{"no such host", func(c *Config) { c.URL = "nats://all:hush7pw@nowhere.invalid:4222" },
			outbox.Transient, "nats_connect"},
		{"no such creds file", func(c *Config) { c.Creds = missing }, outbox.Fatal, "nats_credentials"},
		{"no such seed file", func(c *Config) { c.NKey = missing }, outbox.Fatal, "nats_credentials"},
		{"no such CA file", func(c *Config) { c.TLS.CA = missing }, outbox.Fatal, "nats_credentials"},
		{"no such context", func(c *Config) { c.URL, c.Context = "", missing }, outbox.Fatal,
			"nats_credentials"},
		{"context that can't be read", func(c *Config) { c.URL, c.Context = "", badContext }, outbox.Fatal,
			"nats_credentials"},
	} {
		cfg := config(s.URL())
		test.change(&cfg)
		_, err := Connect(t.Context(), cfg)
		f := wantFault(t, err, test.class, test.code)
		if text := f.Error(); strings.Contains(text, "hush7") || strings.Contains(text, "pw@") {
			t.Errorf("%s: %s", test.name, text)
		}
	}
}

func TestConnectEndsWithItsContext(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	must.Succeed(t, err)
	defer listener.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			cancel(errors.New("enough"))
			_, _ = conn.Read(make([]byte, 1))
			conn.Close()
		}
	}()
	_, err = Connect(ctx, config("nats://"+listener.Addr().String()))
	if f := wantFault(t, err, outbox.Transient, "nats_connect"); !strings.Contains(f.Error(), "enough") {
		t.Error(f)
	}
}

func TestCredentialsOfAllKindsLogIn(t *testing.T) {
	t.Parallel()
	pair, err := nkeys.CreateUser()
	must.Succeed(t, err)
	public, _ := pair.PublicKey()
	seed, _ := pair.Seed()
	seedFile := filepath.Join(t.TempDir(), "seed")
	must.Succeed(t, os.WriteFile(seedFile, seed, 0o600))
	byKey := natstest.Server(t,
		natsserver.Options{Tune: func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} }})
	byToken := natstest.Server(t,
		natsserver.Options{Tune: func(o *server.Options) { o.Authorization = "t0ken" }})
	byUser := natstest.Server(t, natsserver.Options{Tune: limitedUser(">")})
	contextFile := filepath.Join(t.TempDir(), "here.json")
	text := `{"url":"` + byUser.URL() + `","user":"all","password":"pass","inbox_prefix":"_INBOX.context"}`
	must.Succeed(t, os.WriteFile(contextFile, []byte(text), 0o600))
	for name, cfg := range map[string]Config{
		"seed file":       {URL: byKey.URL(), NKey: seedFile},
		"token":           {URL: byToken.URL(), Token: "t0ken"},
		"token in URL":    {URL: strings.Replace(byToken.URL(), "://", "://t0ken@", 1)},
		"user":            {URL: byUser.URL(), User: "all", Password: "pass"},
		"user in URL":     {URL: userURL(byUser, "all")},
		"context":         {Context: contextFile},
		"several servers": {URL: "127.0.0.1:1, " + userURL(byUser, "all")},
		"inbox prefix":    {URL: userURL(byUser, "all"), InboxPrefix: "_INBOX.own"},
	} {
		cfg.Stream = "OUTBOX"
		c := door(t, cfg)
		mustPublish(t, c.Publisher(state(t, c).LastSeq), edits(t, 3))
		want := "_INBOX.outflow."
		switch name {
		case "context":
			want = "_INBOX.context."
		case "inbox prefix":
			want = "_INBOX.own."
		}
		if !strings.HasPrefix(c.inbox, want) {
			t.Errorf("%s: inbox %s", name, c.inbox)
		}
	}
}

func TestAJetStreamDomainIsUsed(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) { o.JetStreamDomain = "hub" }})
	file := filepath.Join(t.TempDir(), "hub.json")
	if err := os.WriteFile(file, []byte(`{"url":"`+s.URL()+`","jetstream_domain":"hub"}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	c := door(t, Config{Context: file, Stream: "OUTBOX"})
	if to := c.api.PublishSubject("a"); to != "$JS.hub.API.a" {
		t.Errorf("what is for a goes to %s", to)
	}
	mustPublish(t, c.Publisher(0), edits(t, 3))
	js, err := c.api.JetStream()
	must.Succeed(t, err)
	if stream, err := js.Stream(t.Context(), "OUTBOX"); err != nil || stream.CachedInfo().State.Msgs != 3 {
		t.Errorf("%v", err)
	}
}

// TestAServerWithoutTLSIsToldAsOne: its certificate is not what is wrong.
func TestAServerWithoutTLSIsToldAsOne(t *testing.T) {
	t.Parallel()
	cfg := config(strings.Replace(natstest.Server(t).URL(), "nats://", "tls://", 1))
	_, err := Connect(t.Context(), cfg)
	wantFault(t, err, outbox.Fatal, "nats_tls")
	if f := outbox.FaultOf(err); !strings.Contains(f.Hint, "say nats:// in nats.url") {
		t.Error(f)
	}
}

func TestTLSIsVerifiedByTheGivenFiles(t *testing.T) {
	t.Parallel()
	ca, _, cert := certificate(t)
	s := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.TLS, o.TLSTimeout = true, 60
		o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{cert}}
	}})
	cfg := config(s.URL())
	_, err := Connect(t.Context(), cfg)
	wantFault(t, err, outbox.Fatal, "nats_tls")
	cfg.TLS.CA = ca
	c := door(t, cfg)
	if _, ok := c.dialer.current().Conn.(*tls.Conn); !ok {
		t.Fatal("not encrypted")
	}
	all := edits(t, 3000)
	mustPublish(t, c.Publisher(0), all)
	same(t, readFrom(t, c.nc, "OUTBOX"), all)
}

// A pipe that nobody writes to would be waited for, a device be read without an end.
func TestFilesThatCannotBeReadAgainAreRefused(t *testing.T) {
	t.Parallel()
	pipe := filepath.Join(t.TempDir(), "pipe")
	must.Succeed(t, syscall.Mkfifo(pipe, 0o600))
	large := filepath.Join(t.TempDir(), "large")
	must.Succeed(t, os.WriteFile(large, nil, 0o600))
	must.Succeed(t, os.Truncate(large, maxFile+1))
	url := natstest.Server(t).URL()
	for setting, set := range map[string]func(c *Config, file string){
		"nats.creds":    func(c *Config, file string) { c.Creds = file },
		"nats.nkey":     func(c *Config, file string) { c.NKey = file },
		"nats.context":  func(c *Config, file string) { c.URL, c.Context = "", file },
		"nats.tls.ca":   func(c *Config, file string) { c.TLS.CA = file },
		"nats.tls.cert": func(c *Config, file string) { c.TLS.Cert = file },
		"nats.tls.key":  func(c *Config, file string) { c.TLS.Key = file },
	} {
		for _, file := range []string{pipe, "/dev/zero", large} {
			cfg := config(url)
			set(&cfg, file)
			c, err := Connect(t.Context(), cfg)
			if err == nil {
				c.Close()
			}
			wantFault(t, err, outbox.Fatal, "nats_credentials")
			if text := fmt.Sprint(err); !strings.Contains(text, setting) || !strings.Contains(text, file) {
				t.Errorf("%s = %s: %s", setting, file, text)
			}
		}
	}
}

func TestTLSWithACertificateOfTheClient(t *testing.T) {
	t.Parallel()
	ca, key, cert := certificate(t)
	clients := x509.NewCertPool()
	clients.AddCert(cert.Leaf)
	s := natstest.Server(t, natsserver.Options{Tune: func(o *server.Options) {
		o.TLS, o.TLSVerify, o.TLSTimeout = true, true, 60
		o.TLSConfig = &tls.Config{
			Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert,
			ClientCAs: clients,
		}
	}})
	cfg := config(s.URL())
	cfg.TLS.CA = ca
	if c, err := Connect(t.Context(), cfg); err == nil {
		c.Close()
		t.Fatal("connected without a certificate")
	}
	cfg.TLS.Cert, cfg.TLS.Key = ca, key
	all := edits(t, 3)
	c := door(t, cfg)
	mustPublish(t, c.Publisher(0), all)
	same(t, readFrom(t, c.nc, "OUTBOX"), all)
}

// certificate makes one that signs itself, and files with it and its key.
func certificate(t *testing.T) (certFile, keyFile string, cert tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must.Succeed(t, err)
	leaf, err := x509.ParseCertificate(der)
	must.Succeed(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	must.Succeed(t, err)
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}),
			0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", secret),
		tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func TestShutdownOfTheServerIsSeen(t *testing.T) {
	t.Parallel()
	s := natstest.Server(t)
	c := door(t, config(s.URL()))
	if c.Err() != nil {
		t.Fatal(c.Err())
	}
	s.Shutdown()
	<-c.Lost()
	wantFault(t, c.Err(), outbox.Transient, "nats_lost")
	if _, err := c.State(t.Context()); outbox.ClassOf(err) != outbox.Transient || err == nil {
		t.Errorf("state of a server that is gone: %v", err)
	}
}
