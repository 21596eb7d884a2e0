package support

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outflowhq/outflow/checkpoint"
	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/lazyregexp"
)

const hidden = "***"

// shortest is the length from which on a secret is also looked for where nothing says that it is one. A
// shorter one stands in any text by chance, and what is hidden would tell it.
const shortest = 4

// redactor hides secrets, and what rows hold. It looks for the secrets that it knows, wherever they stand,
// and for what has the form of one.
type redactor struct {
	secrets *strings.Replacer
	servers string           // of NATS, as the settings or its context have them
	hosts   []*regexp.Regexp // nil: they are kept
	names   map[string]string
}

func newRedactor(cfg config.Config, environ []string) *redactor {
	public := common(cfg)
	public[cfg.NATS.User] = true
	for _, setting := range []string{cfg.Postgres.URL, cfg.Postgres.WriteURL} {
		if c, err := pgconn.ParseConfig(setting); err == nil {
			public[c.User], public[c.Database], public[c.Host] = true, true, true
		}
	}
	var forms []string
	known, servers := knownSecrets(cfg, environ)
	for _, s := range known {
		for line := range strings.SplitSeq(s, "\n") { // of a key, which a log may indent
			if line = strings.TrimSpace(line); len(line) >= 2*shortest {
				known = append(known, line)
			}
		}
	}
	for _, s := range known {
		// A password that is also a name can't be told from the name; where it stands as a password it is
		// found by its form.
		if len(s) >= shortest && !public[s] {
			forms = append(forms, formsOf(s)...)
		}
	}
	slices.SortFunc(forms, func(a, b string) int { return len(b) - len(a) }) // the longest first
	var pairs []string
	for _, f := range slices.Compact(forms) {
		pairs = append(pairs, f, hidden)
	}
	return &redactor{secrets: strings.NewReplacer(pairs...), servers: servers}
}

// common are words that stand everywhere: to hide them would hide nothing, and make the rest unreadable.
func common(cfg config.Config) map[string]bool {
	all := map[string]bool{"postgres": true, "nats": true, "outflow": true, "localhost": true, "true": true,
		"false": true, "null": true}
	for _, name := range []string{cfg.Slot, cfg.Stream, cfg.Publication, cfg.Table} {
		all[name] = true
	}
	return all
}

// quotes are how programs write a text between quotes.
var quotes = []func(string) string{
	strconv.Quote,
	func(s string) string {
		text, _ := json.Marshal(s) // a string always can be encoded
		return string(text)
	},
	func(s string) string {
		var text strings.Builder
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		_ = e.Encode(s)
		return strings.TrimSpace(text.String())
	},
	func(s string) string { return `"` + strings.ReplaceAll(s, `/`, `\/`) + `"` }, // other JSON libraries
}

// formsOf are a secret as it is, and as URLs, SQL, HTML, base64, and JSON and quotes within each other write
// it.
func formsOf(s string) []string {
	all := []string{s, url.QueryEscape(s), url.PathEscape(s), url.UserPassword("", s).String()[1:],
		strings.ReplaceAll(url.QueryEscape(s), "+", "%20"), html.EscapeString(s),
		strings.ReplaceAll(s, `'`, `''`), strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s),
		base64.StdEncoding.EncodeToString([]byte(s)), base64.RawURLEncoding.EncodeToString([]byte(s))}
	for range 2 { // a message within a message, at most
		for _, f := range slices.Clone(all) {
			for _, quote := range quotes {
				quoted := quote(f)
				all = append(all, quoted[1:len(quoted)-1])
			}
		}
		slices.Sort(all)
		all = slices.Compact(all)
	}
	for _, f := range all {
		all = append(all, percent().ReplaceAllStringFunc(f, strings.ToLower))
	}
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(f string) bool { return len(f) < shortest })
}

var (
	keywordPassword = lazyregexp.New(`(?i)password\s*=\s*('(?:\\.|[^'\\])*'|(?:\\.|[^\s\\&])+)`)
	secretName      = lazyregexp.New(`(?i)pass|secret|token|credential|seed|jwt|(?:api|private)_?key`)
	percent         = lazyregexp.New(`%[0-9A-F]{2}`)
	nameOfFile      = lazyregexp.New(`(?i)(file|path|dir)$`)
)

// knownSecrets are those that the settings, the environment, and the files that they name hold. servers are
// those of NATS.
func knownSecrets(cfg config.Config, environ []string) (all []string, servers string) {
	servers = cfg.NATS.URL
	add := func(found ...string) { all = append(all, found...) }
	password, token, _ := cfg.NATS.Login() // one that can't be read is not known to anybody
	add(password, token, cfg.NATS.Password, cfg.NATS.Token)
	ofText := func(text string) {
		for _, m := range keywordPassword().FindAllStringSubmatch(text, -1) {
			value := strings.NewReplacer(`\\`, `\`, `\'`, `'`).Replace(strings.Trim(m[1], "'"))
			add(value)
			if plain, err := url.QueryUnescape(value); err == nil {
				add(plain)
			}
		}
		for _, u := range strings.Split(text, ",") {
			_, rest, isURL := strings.Cut(u, "://")
			if at := strings.LastIndexByte(rest, '@'); isURL && at >= 0 {
				user, pass, both := strings.Cut(rest[:at], ":")
				if !both && !strings.HasPrefix(u, "postgres") {
					pass = user // a token
				}
				add(pass)
				if plain, err := url.PathUnescape(pass); err == nil {
					add(plain)
				}
			}
		}
	}
	for _, setting := range []string{cfg.Postgres.URL, cfg.Postgres.WriteURL} {
		ofText(setting)
		if c, err := pgconn.ParseConfig(setting); err == nil { // also from PGPASSWORD and a password file
			add(c.Password)
		}
	}
	home, _ := os.UserHomeDir()
	passfile, settings := filepath.Join(home, ".pgpass"), home+"/.config"
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		switch {
		case name == "PGPASSFILE":
			passfile = value
		case name == "XDG_CONFIG_HOME" && value != "":
			settings = value
		case secretName().MatchString(name) && !nameOfFile().MatchString(name):
			add(value)
		case strings.HasSuffix(name, "_HEADERS"): // such as OpenTelemetry's: name=value,name=value
			for pair := range strings.SplitSeq(value, ",") {
				_, text, _ := strings.Cut(pair, "=")
				add(text)
				if plain, err := url.PathUnescape(text); err == nil {
					add(plain, plain[strings.LastIndexByte(plain, ' ')+1:]) // also without the word Basic
				}
			}
		case name == "PGSERVICEFILE":
			ofText(fileText(value))
		}
		ofText(value)
	}
	if _, after, ok := strings.Cut(cfg.Postgres.URL, "passfile="); ok {
		passfile, _, _ = strings.Cut(strings.Trim(after, "'"), "&")
		passfile, _, _ = strings.Cut(passfile, " ")
	}
	for line := range strings.SplitSeq(fileText(passfile), "\n") {
		if fields := strings.SplitN(strings.ReplaceAll(line, `\:`, "\x00"), ":", 5); len(fields) == 5 {
			add(strings.NewReplacer("\x00", ":", `\\`, `\`).Replace(strings.TrimRight(fields[4], "\r")))
		}
	}
	files := []string{cfg.NATS.Creds, cfg.NATS.NKey, cfg.NATS.PasswordFile, cfg.NATS.TokenFile,
		cfg.NATS.TLS.Key}
	if name := cfg.NATS.Context; name != "" {
		if !strings.ContainsRune(name, filepath.Separator) {
			name = filepath.Join(settings, "nats", "context", name+".json")
		}
		var fields map[string]any
		if json.Unmarshal([]byte(fileText(name)), &fields) == nil {
			for name, value := range fields {
				text := fmt.Sprint(value)
				if name == "creds" || name == "nkey" {
					files = append(files, text)
				} else if secretName().MatchString(name) {
					add(text)
				}
				if name == "url" {
					servers = text
				}
				ofText(text)
			}
		}
	}
	for server := range strings.SplitSeq(servers, ",") {
		if server = strings.TrimSpace(server); !strings.Contains(server, "://") {
			server = "nats://" + server // as the client reads it
		}
		ofText(server)
	}
	for _, name := range files {
		for line := range strings.SplitSeq(fileText(name), "\n") {
			// not the lines that say what follows
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "--") {
				add(line)
			}
		}
	}
	return all, servers
}

// fileText is the text of a file, "" if it can't be read.
func fileText(name string) string {
	if name == "" {
		return ""
	}
	f, err := openFile(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "" // a pipe was read when the settings were
	}
	text, _ := readUpTo(f, 64<<10)
	return string(text)
}

// What has the form of a secret. Quotes may be escaped: text is quoted within text.
var forms = []struct {
	form func() *regexp.Regexp
	as   string
}{
	{lazyregexp.New(`(?s)-----+BEGIN [A-Z0-9 ]*(?:PRIVATE KEY|SEED|JWT)-----.*?(?:-----+END[A-Z0-9 ]*-----+|\z)`),
		hidden},
	{lazyregexp.New(`\bS[A-Z2-7]{57}\b`), hidden},                 // the seed of an nkey
	{lazyregexp.New(`\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*`), hidden}, // a JWT
	{lazyregexp.New(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s"'<>\\]*@`), "${1}" + hidden + "@"},
	{lazyregexp.New(`(?i)\b(bearer|basic)\s+[\w.~+/=-]{12,}`), "${1} " + hidden},
	{lazyregexp.New(`\b_outflow\.\w+`), "_outflow." + hidden}, // the private ingress
	// the end of a key whose beginning is not in the text
	{lazyregexp.New(`(?:[\w+/=-]{8,}\s+)+-----+END [A-Z0-9 ]*(?:PRIVATE KEY|SEED|JWT)-----`), hidden},
	{lazyregexp.New(`(?i)(authorization\W{1,8}(?:\w+ +)?)[\w.~+/=-]{6,}`), "${1}" + hidden},
	// what rows hold may have parentheses as well: it ends at the last one of the line
	{lazyregexp.New(`(?i)(\bkey \([^)\n]*\)=\()(?:.*\)|[^)]*)`), "${1}" + hidden + ")"},
	{lazyregexp.New(`(?i)(failing row contains \()(?:.*\)|[^)]*)`), "${1}" + hidden + ")"},
}

// named and row are a name and its value, in the forms name=value, name: value and "name": "value". Those of
// named are secret, those of row are what rows hold; in messages that is also: name "value".
var (
	named = pairs(`[\w.-]*(?:passw(?:or)?d|passphrase|pwd|secret|token|credentials?|authorization|api[_-]?key|` +
		`private[_-]?key|seed|jwt)[\w-]*`)
	row = pairs(`doc|doc_id|docs|document|documents|actor|actor_id|key|seq_key|id|ids|event_id|payload|data|body|` +
		`payload_base64|data_base64|subject|missing`)
	told = lazyregexp.New(`(?i)\b((?:doc|doc_id|document|actor|actor_id|key|seq_key|id|event|payload) )` +
		`(\\*")(?:[^"\\]|\\[^"])*\\*"`)
)

func pairs(names string) func() *regexp.Regexp {
	return lazyregexp.New(`(?i)(^|[^\w.-])((?:` + names + `)\\*["']?\s*[=:]\s*)` +
		`(\\+"(?:[^"\\]|\\[^"])*\\+"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|` + "`[^`]*`" +
		`|\{.*\}|[^\s,;&"'})\]\\{\[]+)`)
}

// hide replaces the values of pairs, and leaves their quotes and what is empty.
func hide(text string, form *regexp.Regexp) string {
	return form.ReplaceAllStringFunc(text, func(found string) string {
		m := form.FindStringSubmatch(found)
		name, value := m[2], m[3]
		bare := strings.TrimRight(strings.TrimRight(name, " =:\t"), `"'\`)
		switch quote := value[:len(value)-len(strings.TrimLeft(value, "\\\"'`"))]; {
		case nameOfFile().MatchString(bare), strings.Trim(value, "\\\"'`") == "", value == "null",
			value == "true", value == "false":
			return found
		case quote != "":
			return m[1] + name + quote + hidden + quote
		}
		if strings.HasSuffix(strings.TrimRight(name, " :="), `"`) { // a number of JSON
			return m[1] + name + `"` + hidden + `"`
		}
		return m[1] + name + hidden
	})
}

// clean hides what is secret; rows says that the text may also say what rows hold.
func (r *redactor) clean(text string, rows bool) string {
	text = r.secrets.Replace(text)
	for _, f := range forms {
		text = f.form().ReplaceAllString(text, f.as)
	}
	text = hide(text, named())
	if rows {
		text = told().ReplaceAllString(hide(text, row()), "${1}${2}"+hidden+"${2}")
	}
	return text
}

// withoutConditions hides the conditions of a repair that is under way, which may say what rows hold.
func withoutConditions(r *checkpoint.Record) *checkpoint.Record {
	if r.Begun == nil {
		return r
	}
	shown, begun := *r, *r.Begun
	begun.Attempts = slices.Clone(begun.Attempts)
	for i := range begun.Attempts {
		if a := &begun.Attempts[i]; a.Where != "" {
			a.Where = hidden
		}
	}
	shown.Begun = &begun
	return &shown
}

var (
	hostField = lazyregexp.New(`"(?:host|hostname|leader|cluster|server_name|client_hostname|holder_host)":\s*` +
		`"([^"]+)"`)
	hostOfInstance = lazyregexp.New(`outflow/[^/\s"]+/([\w.-]+)`)
	replicaName    = lazyregexp.New(`"name":\s*"([^"]+)",\s*"current"`)
	ipv4           = lazyregexp.New(`\b(?:\d{1,3}\.){3}\d{1,3}\b`)
	ipv6           = lazyregexp.New(`\[?\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){2,7}\b\]?`)
)

// learn finds the names of hosts, for [redactor.mask]: those of the settings, and those in what was read.
func (r *redactor) learn(cfg config.Config, texts []string) {
	found, public := map[string]bool{}, common(cfg)
	add := func(name string) {
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
		name, _, _ = strings.Cut(name, "/") // the database follows
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
		// a socket's directory is not a name
		if len(name) > 1 && !public[name] && net.ParseIP(name) == nil {
			found[name] = true
		}
	}
	own, _ := os.Hostname()
	add(own)
	for _, setting := range []string{cfg.Postgres.URL, cfg.Postgres.WriteURL} {
		if c, err := pgconn.ParseConfig(setting); err == nil {
			add(c.Host)
			for _, other := range c.Fallbacks {
				add(other.Host)
			}
		}
	}
	for _, text := range strings.Split(r.servers, ",") {
		_, rest, isURL := strings.Cut(text, "://")
		if !isURL {
			rest = text
		}
		add(strings.TrimSpace(rest[strings.LastIndexByte(rest, '@')+1:]))
	}
	add(cfg.Listen)
	for name := range strings.SplitSeq(cfg.ListenHosts, ",") {
		add(strings.TrimSpace(name))
	}
	for _, text := range texts {
		for _, form := range []*regexp.Regexp{hostField(), hostOfInstance(), replicaName()} {
			for _, m := range form.FindAllStringSubmatch(text, -1) {
				add(m[1])
			}
		}
	}
	names := make([]string, 0, len(found))
	for name := range found {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if len(a) != len(b) {
			return len(b) - len(a) // the longest first: one may be the beginning of another
		}
		return strings.Compare(a, b)
	})
	r.names = map[string]string{}
	for i, name := range names {
		r.names[strings.ToLower(name)] = fmt.Sprintf("host-%d", i+1)
		r.hosts = append(r.hosts, regexp.MustCompile(`(?i)\b`+regexp.QuoteMeta(name)+`\b`))
	}
}

// mask replaces names and addresses of hosts, the same one by the same word in all files.
func (r *redactor) mask(text string) string {
	for _, host := range r.hosts {
		text = host.ReplaceAllStringFunc(text, func(found string) string {
			return r.names[strings.ToLower(found)]
		})
	}
	address := func(found string) string {
		ip := net.ParseIP(strings.Trim(found, "[]"))
		if ip == nil || ip.IsLoopback() || ip.IsUnspecified() {
			return found
		}
		if r.names[found] == "" {
			r.names[found] = fmt.Sprintf("address-%d", len(r.names)-len(r.hosts)+1)
		}
		return r.names[found]
	}
	return ipv6().ReplaceAllStringFunc(ipv4().ReplaceAllStringFunc(text, address), address)
}
