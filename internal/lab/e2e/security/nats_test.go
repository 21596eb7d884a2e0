package security

import (
	"crypto/tls"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/outflowhq/outflow/internal/lab/harness"
	"github.com/outflowhq/outflow/internal/lab/natsserver"
	"github.com/outflowhq/outflow/internal/lab/natstest"
	"github.com/outflowhq/outflow/internal/lab/pgtest"
)

// tlsOf makes a server speak TLS.
func tlsOf(c *tls.Config) func(*server.Options) {
	return func(o *server.Options) { o.TLS, o.TLSConfig = true, c }
}

// at is the address of a server under a name, with or without a user.
func at(s *natsserver.Server, scheme string, user *url.Userinfo, host string) string {
	u := url.URL{Scheme: scheme, User: user, Host: fmt.Sprintf("%s:%d", host, s.Port)}
	return u.String()
}

// stored counts the messages of a stream, asked over a connection with options of the test's own.
func stored(t *testing.T, address, stream string, options ...nats.Option) func() error {
	t.Helper()
	nc, err := nats.Connect(address, append(options, nats.Timeout(harness.AskTimeout))...)
	harness.Must(t, err)
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(harness.AskTimeout))
	harness.Must(t, err)
	return func() error {
		s, err := js.Stream(t.Context(), stream)
		if err != nil {
			return err
		}
		if n := s.CachedInfo().State.Msgs; n != 3 {
			return fmt.Errorf("%d messages", n)
		}
		return nil
	}
}

// operated is a server in operator mode, and a credentials file of one of its users.
func operated(t *testing.T) (tune func(*server.Options), creds string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		harness.Must(t, err)
	}
	pair := func(make func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		k, err := make()
		must(err)
		public, err := k.PublicKey()
		must(err)
		return k, public
	}
	operator, operatorKey := pair(nkeys.CreateOperator)
	_, systemKey := pair(nkeys.CreateAccount)
	account, accountKey := pair(nkeys.CreateAccount)
	user, userKey := pair(nkeys.CreateUser)

	claims := jwt.NewOperatorClaims(operatorKey)
	claims.SystemAccount = systemKey
	resolver := &server.MemAccResolver{}
	for _, key := range []string{systemKey, accountKey} {
		a := jwt.NewAccountClaims(key)
		if key == accountKey {
			a.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: jwt.NoLimit,
				DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit}
		}
		token, err := a.Encode(operator)
		must(err)
		must(resolver.Store(key, token))
	}
	token, err := jwt.NewUserClaims(userKey).Encode(account)
	must(err)
	seed, err := user.Seed()
	must(err)
	content, err := jwt.FormatUserConfig(token, seed)
	must(err)
	return func(o *server.Options) {
		o.TrustedOperators, o.SystemAccount, o.AccountResolver = []*jwt.OperatorClaims{claims}, systemKey,
			resolver
	}, harness.WriteFile(t, "user.creds", string(content))
}

// TestEveryLoginToNATSWorks runs the whole way for each way to connect and to log in.
func TestEveryLoginToNATSWorks(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	ca := newAuthority(t, "authority")
	cert, key := ca.issue("client")
	const password = "sesame-\"'/:@ 5521"
	users := func(o *server.Options) { o.Username, o.Password = "app", password }
	token := func(o *server.Options) { o.Authorization = password }
	user, err := nkeys.CreateUser()
	harness.Must(t, err)
	public, err := user.PublicKey()
	harness.Must(t, err)
	seed, err := user.Seed()
	harness.Must(t, err)
	jwtMode, creds := operated(t)
	login := url.UserPassword("app", password)
	plain := func(settings ...string) func(t *testing.T, s *natsserver.Server) []string {
		return func(*testing.T, *natsserver.Server) []string { return settings }
	}
	for name, c := range map[string]struct {
		tune     func(*server.Options)
		settings func(t *testing.T, s *natsserver.Server) []string
		reader   []nats.Option
	}{
		"tls": {tlsOf(ca.serverTLS(false, "localhost")), func(_ *testing.T, s *natsserver.Server) []string {
			return []string{"NATS_URL=" + at(s, "tls", nil, "localhost"), "NATS_TLS_CA=" + ca.file}
		}, []nats.Option{nats.RootCAs(ca.file)}},
		"mtls": {tlsOf(ca.serverTLS(true, "localhost")), func(_ *testing.T, s *natsserver.Server) []string {
			return []string{"NATS_URL=" + at(s, "nats", nil, "localhost"), "NATS_TLS_CA=" + ca.file,
				"NATS_TLS_CERT=" + cert, "NATS_TLS_KEY=" + key}
		}, []nats.Option{nats.RootCAs(ca.file), nats.ClientCert(cert, key)}},
		"user": {users, plain("NATS_USER=app", "NATS_PASSWORD="+password),
			[]nats.Option{nats.UserInfo("app", password)}},
		"user_file": {users, plain("NATS_USER=app", "NATS_PASSWORD_FILE="+
			harness.WriteFile(t, "password", password+"\n")),
			[]nats.Option{nats.UserInfo("app", password)}},
		"user_url": {users, func(_ *testing.T, s *natsserver.Server) []string {
			return []string{"NATS_URL=" + at(s, "nats", login, "localhost")}
		}, []nats.Option{nats.UserInfo("app", password)}},
		"token": {token, plain("NATS_TOKEN=" + password), []nats.Option{nats.Token(password)}},
		"token_file": {token, plain("NATS_TOKEN_FILE=" + harness.WriteFile(t, "token", password+"\n")),
			[]nats.Option{nats.Token(password)}},
		"token_url": {token, func(_ *testing.T, s *natsserver.Server) []string {
			return []string{"NATS_URL=" + at(s, "nats", url.User(password), "localhost")}
		}, []nats.Option{nats.Token(password)}},
		"nkey": {func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} },
			plain("NATS_NKEY=" + harness.WriteFile(t, "user.nk", string(seed))),
			[]nats.Option{nats.Nkey(public, user.Sign)}},
		"creds": {jwtMode, plain("NATS_CREDS=" + creds), []nats.Option{nats.UserCredentials(creds)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := natstest.Server(t, natsserver.Options{Tune: c.tune})
			address := at(s, "nats", nil, "localhost")
			o, conn, _ := harness.Install(t, pg, address, "login",
				append(c.settings(t, s), "LOG_LEVEL=debug")...)
			o.Init()
			o.Start()
			o.AwaitReady()
			for i := range 3 {
				harness.Insert(t, conn, "doc", i, `{}`)
			}
			harness.Eventually(t, "published", stored(t, address, o.Stream, c.reader...))
			out, errOut, code := o.Run("status")
			if code != 0 {
				t.Errorf("outflow status: exit code %d\n%s", code, errOut)
			}
			o.MustStop(t)
			if log := o.Log.String() + out + errOut; strings.Contains(log, password) ||
				strings.Contains(log, string(seed)) {
				t.Errorf("a secret is shown:\n%s", log)
			}
		})
	}
}

// TestARefusalByNATSNamesTheSettingAndNoSecret: what is wrong is said in words, with the setting's name, by
// init and by run, and no secret is.
func TestARefusalByNATSNamesTheSettingAndNoSecret(t *testing.T) {
	t.Parallel()
	pg := pgtest.Server(t)
	ca, stranger := newAuthority(t, "authority"), newAuthority(t, "stranger")
	cert, key := stranger.issue("client")
	const secret = "open-sesame-9917"
	protected := func(o *server.Options) { o.Username, o.Password = "app", "another" }
	jwtMode, _ := operated(t)
	_, creds := operated(t) // of another operator
	for name, c := range map[string]struct {
		tune     func(*server.Options)
		scheme   string
		host     string
		settings []string
		says     []string
	}{
		"another authority": {tlsOf(ca.serverTLS(false, "localhost")), "tls", "localhost",
			[]string{"NATS_TLS_CA=" + stranger.file}, []string{"certificate"}},
		"the system's": {tlsOf(ca.serverTLS(false, "localhost")), "tls", "localhost", nil,
			[]string{"certificate"}},
		"another host": {tlsOf(ca.serverTLS(false, "elsewhere")), "tls", "localhost",
			[]string{"NATS_TLS_CA=" + ca.file}, []string{"certificate", "localhost"}},
		"no TLS there": {nil, "tls", "localhost", nil, []string{"secure"}},
		// TLS 1.3: the client may hear of it only as a broken pipe
		"no certificate": {tlsOf(ca.serverTLS(true, "localhost")), "tls", "localhost",
			[]string{"NATS_TLS_CA=" + ca.file}, []string{"nats.url"}},
		"a stranger's": {tlsOf(ca.serverTLS(true, "localhost")), "tls", "localhost",
			[]string{"NATS_TLS_CA=" + ca.file, "NATS_TLS_CERT=" + cert, "NATS_TLS_KEY=" + key},
			[]string{"nats.url"}},
		"no CA file": {nil, "tls", "localhost", []string{"NATS_TLS_CA=/nowhere/ca.pem"},
			[]string{"/nowhere/ca.pem"}},
		"wrong password": {protected, "nats", "localhost",
			[]string{"NATS_USER=app", "NATS_PASSWORD=" + secret}, []string{"uthorization"}},
		"wrong token": {protected, "nats", "localhost", []string{"NATS_TOKEN=" + secret},
			[]string{"uthorization"}},
		"no login": {protected, "nats", "localhost", nil, []string{"uthorization"}},
		"wrong creds": {jwtMode, "nats", "localhost", []string{"NATS_CREDS=" + creds},
			[]string{"uthorization"}},
		"no creds": {jwtMode, "nats", "localhost", []string{"NATS_CREDS=/nowhere/user.creds"},
			[]string{"/nowhere/user.creds"}},
		"no password file": {protected, "nats", "localhost",
			[]string{"NATS_USER=app", "NATS_PASSWORD_FILE=/nowhere/password"},
			[]string{"/nowhere/password", "nats.password_file"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := natstest.Server(t, natsserver.Options{Tune: c.tune})
			o, conn, _ := harness.Install(t, pg, at(s, c.scheme, nil, c.host), "refused",
				append(c.settings, "LOG_LEVEL=debug")...)
			sql, _, _ := o.Run("init", "--print") // init makes nothing while NATS refuses it
			harness.Exec(t, conn, sql)
			out, errOut, code := o.Run("init")
			if code == 0 {
				t.Error("outflow init: exit code 0")
			}
			o.MustContain("outflow init", errOut, append(c.says, "nats.")...)
			o.Start()
			harness.Eventually(t, "run says why", func() error {
				log := o.Log.String()
				for _, s := range append(c.says, "nats.") {
					if !strings.Contains(log, s) {
						return fmt.Errorf("not %q:\n%s", s, log)
					}
				}
				return nil
			})
			o.Kill()
			if all := out + errOut + o.Log.String(); strings.Contains(all, secret) {
				t.Errorf("a secret is shown:\n%s", all)
			}
		})
	}
}
