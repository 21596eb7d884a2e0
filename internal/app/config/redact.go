package config

import (
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

const hidden = "***"

// secrecy says what of a value may be shown.
type secrecy uint8

const (
	open        secrecy = iota
	secret              // nothing
	postgresKey         // a connection string without its passwords
	natsKey             // a URL, or a list of them, without passwords and tokens
)

func (s secrecy) show(text string) string {
	switch {
	case text == "" || s == open:
		return text
	case s == postgresKey:
		return redactPostgres(text)
	case s == natsKey:
		return redactNATS(text)
	}
	return hidden
}

// keywords tells "host=... dbname=..." from a URL; keyword finds the first of them.
var (
	keywords = lazyregexp.New(`^\s*\w+\s*=`)
	word     = lazyregexp.New(`^[a-z_]+$`)
	keyword  = lazyregexp.New(`^(\s*)(\w+)(\s*=\s*)('(?:\\.|[^'\\])*'?|(?:\\.|[^\s\\])+|)`)
)

// shown are the parameters whose values may be shown. Any other may be a password, for example under a
// mistyped name.
var shown = map[string]bool{
	"host": true, "hostaddr": true, "port": true, "dbname": true, "database": true, "user": true,
	"application_name": true, "connect_timeout": true,
	"sslmode": true, "sslrootcert": true, "sslcert": true, "sslkey": true, "sslnegotiation": true,
	"sslsni": true, "channel_binding": true,
	"target_session_attrs": true, "load_balance_hosts": true, "passfile": true, "service": true,
	"require_auth": true,
}

// redactPostgres doesn't rely on a parser, because what can't be parsed must not be shown either. A password
// may contain any character, so everything from the colon after the user to the last @ is hidden.
func redactPostgres(s string) string {
	scheme, rest, isURL := strings.Cut(s, "://")
	switch {
	case keywords().MatchString(s):
		return redactKeywords(s)
	case !isURL:
		return hidden // perhaps nothing but a password
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, ok := strings.Cut(rest[:at], ":")
		switch {
		case strings.ContainsAny(user, "/?#") && ok:
			return scheme + "://" + hidden
		case ok:
			rest = user + ":" + hidden + rest[at:]
		}
	}
	rest, query, ok := strings.Cut(rest, "?")
	if ok {
		rest += "?"
		for i, param := range strings.Split(query, "&") {
			if i > 0 {
				rest += "&"
			}
			switch name, _, ok := strings.Cut(param, "="); {
			case shown[strings.ToLower(name)]:
			case ok && word().MatchString(name):
				param = name + "=" + hidden
			default:
				param = hidden
			}
			rest += param
		}
	}
	return scheme + "://" + rest
}

func redactKeywords(s string) string {
	var b strings.Builder
	for s != "" {
		m := keyword().FindStringSubmatch(s)
		if m == nil { // perhaps the rest of a password
			if strings.TrimSpace(s) != "" {
				b.WriteString(" " + hidden)
			}
			break
		}
		value := m[4]
		if value != "" && !shown[strings.ToLower(m[2])] {
			value = hidden
		}
		b.WriteString(m[1] + m[2] + m[3] + value)
		s = s[len(m[0]):]
	}
	return b.String()
}

// redactNATS hides everything before the @ of each URL: a user alone may be a token.
func redactNATS(s string) string {
	urls := strings.Split(s, ",")
	for i, u := range urls {
		at := strings.LastIndexByte(u, '@')
		if at < 0 {
			continue
		}
		scheme, _, isURL := strings.Cut(u[:at], "://")
		if !isURL {
			if i > 0 { // the comma may have been part of a password
				return hidden
			}
			scheme = ""
		} else {
			scheme += "://"
		}
		urls[i] = scheme + hidden + u[at:]
	}
	return strings.Join(urls, ",")
}

// HidePasswords returns a connection URL or keyword string of PostgreSQL without its passwords.
func HidePasswords(url string) string { return postgresKey.show(url) }

// Server says where NATS is, without secrets.
func (n NATS) Server() string {
	if n.Context != "" {
		return "context " + n.Context
	}
	return redactNATS(n.URL)
}

// Where names the setting that says where NATS is, and its value without secrets.
func (n NATS) Where() string {
	if n.Context != "" {
		return "nats.context " + n.Context
	}
	return "nats.url " + redactNATS(n.URL)
}
