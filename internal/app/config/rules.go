package config

import (
	"net"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// maxIdentifier is the greatest length of a PostgreSQL identifier, in bytes.
const maxIdentifier = 63

// maxStream leaves room in JetStream's 255 bytes for the name of the stream behind the bucket,
// KV_outflow-<stream>.
const maxStream = 255 - len("KV_outflow-")

func asciiAlnum(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// identifier reports whether s can be a name in PostgreSQL.
func identifier(s string) bool {
	return s != "" && len(s) <= maxIdentifier && utf8.ValidString(s) &&
		!strings.ContainsFunc(s, unicode.IsControl)
}

func emptyOrIdentifier(s string) bool { return s == "" || identifier(s) }

// tableName accepts schema.name and name.
func tableName(s string) bool {
	schema, name, qualified := strings.Cut(s, ".")
	if !qualified {
		return identifier(s)
	}
	return identifier(schema) && identifier(name) && !strings.Contains(name, ".")
}

func emptyOrTable(s string) bool { return s == "" || tableName(s) }

// sameTable reports whether two names are of one table: one without a schema is of public.
func sameTable(a, b string) bool {
	qualified := func(name string) string {
		if !strings.Contains(name, ".") {
			return "public." + name
		}
		return name
	}
	return qualified(a) == qualified(b)
}

func slotName(s string) bool {
	for i := range len(s) {
		if c := s[i]; c != '_' && (!asciiAlnum(c) || c >= 'A' && c <= 'Z') {
			return false
		}
	}
	return s != "" && len(s) <= maxIdentifier
}

// StreamName reports whether a stream can have that name.
func StreamName(s string) bool {
	for i := range len(s) {
		if c := s[i]; c != '_' && c != '-' && !asciiAlnum(c) {
			return false
		}
	}
	return s != "" && len(s) <= maxStream
}

func filled(s string) bool { return s != "" }

// consumerName accepts what JetStream takes for the name of a consumer.
func consumerName(s string) bool { return s != "" && !strings.ContainsAny(s, " \t\r\n.*>/\\") }

var hostName = lazyregexp.New(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

// hostNames accepts names, separated by commas, and "".
func hostNames(s string) bool {
	if s == "" {
		return true
	}
	for name := range strings.SplitSeq(s, ",") {
		if !hostName().MatchString(strings.TrimSpace(name)) {
			return false
		}
	}
	return true
}

// listenAddress accepts host:port with a numeric port, and "".
func listenAddress(s string) bool {
	if s == "" {
		return true
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || strings.ContainsAny(host, " /") {
		return false
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err == nil
}

// postgresURL accepts a URL, a list of keywords and values, and "". What is in them is for the connection to
// judge.
func postgresURL(s string) bool {
	if s == "" {
		return true
	}
	if scheme, _, ok := strings.Cut(s, "://"); ok && !strings.ContainsAny(scheme, " =") {
		return scheme == "postgres" || scheme == "postgresql"
	}
	return strings.Contains(s, "=")
}

// archiveURL accepts the URL of a local folder, that of a bucket, and "". Credentials have no place in it,
// because it is shown.
func archiveURL(s string) bool {
	u, err := url.Parse(s)
	switch {
	case s == "":
		return true
	case err != nil || u.Fragment != "" || u.User != nil:
		return false
	case u.Scheme == "s3":
		endpoint, err := url.Parse(u.Query().Get("endpoint"))
		return u.Host != "" && u.Path == "" && err == nil && endpoint.User == nil
	case u.Scheme == "gs", u.Scheme == "azblob":
		return u.Host != "" && u.Path == ""
	}
	return u.Scheme == "file" && u.Host == "" && strings.HasPrefix(u.Path, "/") && u.RawQuery == ""
}

// natsURLs accepts one or more servers, separated by commas, and "".
func natsURLs(s string) bool {
	if s == "" {
		return true
	}
	for one := range strings.SplitSeq(s, ",") {
		one = strings.TrimSpace(one)
		if !strings.Contains(one, "://") {
			one = "nats://" + one
		}
		u, err := url.Parse(one)
		if err != nil || u.Hostname() == "" {
			return false
		}
		switch u.Scheme {
		case "nats", "tls": // not ws, wss: see sink
		default:
			return false
		}
	}
	return true
}
