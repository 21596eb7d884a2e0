package doctor

import (
	"time"

	"github.com/outflowhq/outflow/internal/app/units"
	"github.com/outflowhq/outflow/internal/finding"
)

// soon and verySoon are how long before something expires it is a risk, and an emergency.
const (
	soon     = 14 * 24 * time.Hour
	verySoon = 24 * time.Hour
)

var configChecks = []check{
	{name: "config.secret_files", needs: []source{srcHost}, beforeInit: true,
		about: func(f *Facts) bool { return len(secretFiles(f.Config)) > 0 },
		run: func(f *Facts, r *reporter) {
			for _, path := range f.Host.Open {
				r.find("secret_file_mode", "every user of this host may read %s", path).Command =
					"chmod 0600 " + finding.Word(path)
			}
		}},
	{name: "config.in_force", needs: []source{srcRecord},
		about: func(f *Facts) bool { return f.newest() != nil },
		run: func(f *Facts, r *reporter) {
			now, then := f.Config.Reorder.Settings(), f.newest().Settings
			if now != then {
				r.find("settings_differ", "the checkpoint record has %v, the configuration says %v", then,
					now)
			}
			r.ok("%v", now)
		}},
}

// expiring reports certificates that end soon.
func expiring(f *Facts, r *reporter, all []Certificate) {
	const code = "certificate_expiry"
	for _, c := range all {
		left := c.Until.Sub(f.Now)
		at := c.Until.UTC().Format("2006-01-02 15:04 UTC")
		switch {
		case left <= 0:
			r.findAs(finding.Critical, code, "%s expired at %s", c.What, at)
		case left < verySoon:
			r.findAs(finding.Critical, code, "%s expires at %s, in %v", c.What, at, left.Round(time.Minute))
		case left < soon:
			r.find(code, "%s expires at %s, in %s", c.What, at, units.Of(int(left.Hours()/24), "day"))
		}
	}
}

// protected reports a connection to another host that others can listen to, or take over.
func protected(r *reporter, to, setting string, l Link) {
	switch {
	case l.Local:
		r.ok("it does not leave this host")
	case !l.TLS:
		r.find("connection_unencrypted", "the connection to %s is not encrypted", to).Hint = setting
	case !l.Verified:
		r.find("connection_unverified",
			"the connection to %s is encrypted, and nobody checks who the server is",
			to).Hint = setting
	default:
		r.ok("TLS, verified")
	}
}
