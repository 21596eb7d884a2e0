package sink

import (
	"errors"
	"net/url"
	"strings"

	"github.com/outflowhq/outflow/internal/lazyregexp"
)

// scrubbed is an error whose text holds no secrets. It keeps its cause for errors.Is and As; nothing prints
// that.
type scrubbed struct {
	text  string
	cause error
}

func (s *scrubbed) Error() string { return s.text }

func (s *scrubbed) Is(target error) bool { return errors.Is(s.cause, target) }

func (s *scrubbed) As(target any) bool { return errors.As(s.cause, target) }

// shortest is the length, in bytes, from which on a secret is looked for by itself: a shorter one stands in
// any text by chance, and would be told by what is hidden. Of URLs nothing gets as far as an error anyway,
// because those that can be read in two ways are refused.
const shortest = 4

var userinfo = lazyregexp.New(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^"\n]*@`)

// scrub takes out the user information of URLs and the settings that are secret.
func scrub(err error, cfg Config) error {
	if err == nil {
		return nil
	}
	text := userinfo().ReplaceAllString(err.Error(), "${1}***@")
	secrets := []string{cfg.Password, cfg.Token}
	for _, s := range strings.Split(cfg.URL, ",") {
		if u, err := url.Parse(strings.TrimSpace(s)); err == nil && u.User != nil {
			password, has := u.User.Password()
			if !has {
				password = u.User.Username() // a token
			}
			secrets = append(secrets, u.User.String(), password)
		}
	}
	for _, s := range secrets {
		if len(s) >= shortest {
			text = strings.ReplaceAll(text, s, "***")
		}
	}
	return &scrubbed{text, err}
}
