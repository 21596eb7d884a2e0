package config

import (
	"regexp"
	"strings"
)

const hidden = "***"

// secrecy says what of a value may be shown.
type secrecy uint8

const (
	open        secrecy = iota
	secret              // nothing
	postgresKey         // a connection string without its passwords
	natsKey             // a list of URLs without passwords and tokens
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

// keywords tells "host=... password=..." from a URL. passwordWord finds the values of password and sslpassword among keywords and values and among a URL's parameters.
var (
	keywords      = regexp.MustCompile(`^\s*\w+\s*=`)
	passwordWord  = regexp.MustCompile(`(?i)((?:ssl)?password\s*=\s*)('(?:\\.|[^'\\])*'?|(?:\\.|[^\s\\])+)`)
	passwordParam = regexp.MustCompile(`(?i)([?&](?:ssl)?password=)[^&#]*`)
)

// redactPostgres doesn't parse: what can't be parsed must not be shown either. A password may hold any character, so all from the
// colon after the user to the last @ is hidden.
func redactPostgres(s string) string {
	scheme, rest, isURL := strings.Cut(s, "://")
	switch {
	case keywords.MatchString(s):
		return passwordWord.ReplaceAllString(s, "${1}"+hidden)
	case !isURL:
		return hidden // perhaps nothing but a password
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		if user, _, ok := strings.Cut(rest[:at], ":"); ok {
			rest = user + ":" + hidden + rest[at:]
		}
	}
	return scheme + "://" + passwordParam.ReplaceAllString(rest, "${1}"+hidden)
}

// redactNATS hides all that stands before the @ of each URL: a user alone may be a token.
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

// Where names the setting that says where NATS is, and its value without secrets.
func (n NATS) Where() string {
	if n.Context != "" {
		return "nats.context " + n.Context
	}
	return "nats.url " + redactNATS(n.URL)
}
