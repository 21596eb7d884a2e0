package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outflowhq/outflow/internal/app/config"
	"github.com/outflowhq/outflow/internal/app/progress"
	"github.com/outflowhq/outflow/outbox"
)

func (a *App) healthcheckCommand() *cobra.Command {
	return a.configured(&cobra.Command{
		Use:   "healthcheck",
		Short: "Ask a running outflow's /healthz, for images without a shell",
		Long: `Asks /healthz of the outflow that listens on the setting listen. Exit code 0 if it is
alive, 1 if it is not or does not answer within 3 s.`,
		Example: "  outflow healthcheck --listen 127.0.0.1:7422\n  HEALTHCHECK CMD [\"/outflow\", " +
			"\"healthcheck\"]   (in a Dockerfile)",
	}, func(ctx context.Context, cfg config.Config) error {
		if cfg.Listen == "" {
			return &outbox.Fault{Class: outbox.Usage, Code: "listen", Message: `listen is ""`,
				Hint: "Set it to the address of the outflow to ask"}
		}
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		return probe(ctx, "http://"+local(cfg.Listen)+"/healthz")
	})
}

// local is the address that reaches a listener on this host: one on all addresses is asked over loopback.
func local(listen string) string {
	for _, all := range []string{"0.0.0.0:", "[::]:", ":"} {
		if port, ok := strings.CutPrefix(listen, all); ok {
			return "127.0.0.1:" + port
		}
	}
	return listen
}

func probe(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	defer progress.Wait(ctx, "waiting for "+url)()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("no outflow answers: %w. Does `outflow run` run here, with this setting listen?",
			err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
