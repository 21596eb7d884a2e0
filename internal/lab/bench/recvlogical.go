package bench

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"syscall"
	"time"

	"github.com/outflowhq/outflow/internal/lab/process"
)

const recvLogicalName = "pg_recvlogical"

// recvLogical is PostgreSQL's own reader of a slot, which throws away what it reads: what decoding and
// sending alone cost.
type recvLogical struct {
	w     *harness
	path  string
	child *process.Process
}

func (r *recvLogical) name() string { return recvLogicalName }
func (r *recvLogical) id() string   { return r.w.name + "_recv" }

func (r *recvLogical) prepare(ctx context.Context, _ *Case) error {
	return r.w.makeSlot(ctx, r.id())
}

// makeSlot makes a slot and a publication of the same name.
func (w *harness) makeSlot(ctx context.Context, id string) error {
	return w.exec(ctx, "DROP PUBLICATION IF EXISTS "+id,
		"CREATE PUBLICATION "+id+" FOR TABLE "+outboxName+" WITH (publish = 'insert')",
		"SELECT pg_create_logical_replication_slot('"+id+
			"', 'pgoutput') WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '"+id+"')")
}

func (r *recvLogical) drain(ctx context.Context, _ *Case, b backlog) (sample, error) {
	costs, err := r.w.costs(ctx)
	if err != nil {
		return nil, err
	}
	log := &tail{}
	target, err := url.Parse(r.w.pgURL)
	if err != nil {
		return nil, errors.New("--postgres.url cannot be read")
	}
	env := environ()
	if password, ok := target.User.Password(); ok { // everyone on the machine sees arguments
		env, target.User = append(env, "PGPASSWORD="+password), url.User(target.User.Username())
	}
	cmd := exec.Command(r.path, "-d", target.String(), "-S", r.id(), "--start", "-f", "/dev/null",
		"--no-loop", "--endpos", b.end.String(), "-o", "proto_version=1", "-o", "publication_names="+r.id())
	cmd.Env, cmd.Stdout, cmd.Stderr = env, log, log
	begun := time.Now()
	if r.child, err = process.Start(cmd, syscall.SIGKILL); err != nil {
		return nil, err
	}
	select {
	case <-r.child.Done():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	ended := time.Now()
	if err := r.child.Wait(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", recvLogicalName, err, log)
	}
	got := sample{cpuItself: microseconds(cmd.ProcessState.UserTime()+
		cmd.ProcessState.SystemTime()) / float64(b.rows)}
	got.rate(b.rows, begun, ended)
	return got, costs.end(ctx, b.rows, got)
}

func (r *recvLogical) cleanUp(ctx context.Context) error {
	if r.child != nil && r.child.Running() {
		_ = r.child.Kill() // it may just have ended
	}
	return r.w.dropSlot(ctx, r.id())
}

// dropSlot drops a slot and the publication of the same name.
func (w *harness) dropSlot(ctx context.Context, id string) error {
	return errors.Join(
		persist(ctx, func(ctx context.Context) error { return w.dropSlots(ctx, literal(id)) }),
		w.exec(ctx, "DROP PUBLICATION IF EXISTS "+id))
}
