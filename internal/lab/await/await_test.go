package await

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// failing records that it failed, and ends the goroutine as a test does.
type failing struct{ text string }

func (f *failing) Helper() {}
func (f *failing) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// waits runs Until in a bubble, and returns how it failed and after how long.
func waits(t *testing.T, check func(since time.Duration) error, alive ...func() error) (failed string,
	took time.Duration) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		begun := time.Now()
		f := &failing{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Until(f, "it comes", func() error { return check(time.Since(begun)) }, alive...)
		}()
		<-done
		failed, took = f.text, time.Since(begun)
	})
	return failed, took
}

func TestAWaitEndsWhenNothingChanges(t *testing.T) {
	t.Setenv("OUTFLOW_TEST_LONG", "")
	never := errors.New("nothing yet")
	ended := func() error { return errors.New("exit code 3") }
	runs := func() error { return nil }
	for _, c := range []struct {
		name     string
		check    func(since time.Duration) error
		alive    func() error
		from, to time.Duration
		says     string
	}{
		{"it is there", func(time.Duration) error { return nil }, ended, 0, 0, ""},
		{"it comes late", func(since time.Duration) error {
			if since > 50*time.Second {
				return nil
			}
			return never
		}, runs, 50 * time.Second, 51 * time.Second, ""},
		{"it never comes", func(time.Duration) error { return never }, runs, time.Minute, 61 * time.Second,
			"nothing yet"},
		{"the process has ended", func(time.Duration) error { return never }, ended, dead, 31 * time.Second,
			"exit code 3"},
		{"it goes on after the process has ended", func(since time.Duration) error {
			if since > 50*time.Second {
				return nil
			}
			return fmt.Errorf("%v", since.Truncate(5*time.Second))
		}, ended, 50 * time.Second, 51 * time.Second, ""},
		{"it goes on for ever", func(since time.Duration) error { return fmt.Errorf("%v", since) }, runs,
			Limit, Limit + time.Second, "3m0"},
		{"the machine stands still", func(since time.Duration) error {
			time.Sleep(30 * time.Second)
			if since > 2*time.Minute {
				return nil
			}
			return never
		}, runs, 2 * time.Minute, Limit, ""},
	} {
		failed, took := waits(t, c.check, c.alive)
		if (failed == "") != (c.says == "") || !strings.Contains(failed, c.says) || took < c.from ||
			took > c.to {
			t.Errorf("%s: %q after %v, want %q after %v to %v", c.name, failed, took, c.says, c.from, c.to)
		}
	}
}

// A check that runs a program would otherwise keep a core from what is waited for.
func TestASlowCheckIsMadeLessOften(t *testing.T) {
	for _, c := range []struct {
		takes time.Duration
		most  int // checks within 12 s
	}{{0, 602}, {100 * time.Millisecond, 42}, {time.Second, 10}} {
		checks := 0
		failed, _ := waits(t, func(since time.Duration) error {
			if checks++; since > 12*time.Second {
				return nil
			}
			time.Sleep(c.takes)
			return errNotYet
		})
		if failed != "" || checks > c.most || checks < c.most/2 {
			t.Errorf("a check of %v was made %d times, want %d at most: %s", c.takes, checks, c.most, failed)
		}
	}
}
