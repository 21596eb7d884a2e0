// Package packaging tests what an installation is made of: the Helm chart, the image, the file for Docker
// Compose and the configuration that the packages bring. It is a module of its own, because the libraries
// that read these files are many.
package packaging

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	compose "github.com/compose-spec/compose-go/v2/types"
	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/client/llb/sourceresolver"
	"github.com/moby/buildkit/frontend/dockerfile/dockerfile2llb"
	"github.com/opencontainers/go-digest"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart"
	chartloader "helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const chartDir = "chart/outflow"

// values returns a file of testdata.
func values(t *testing.T, name string) (v map[string]any) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("testdata", name+".yaml"))
	if err == nil {
		err = yaml.Unmarshal(content, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// render returns the objects that an installation makes, each decoded strictly into its type.
func render(c *chart.Chart, v map[string]any) (objects []any, err error) {
	all, err := chartutil.ToRenderValues(c, v,
		chartutil.ReleaseOptions{Name: "rel", Namespace: "ns", IsInstall: true, Revision: 1}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		for _, doc := range strings.Split("\n"+files[name], "\n---\n") {
			if strings.TrimSpace(doc) == "" {
				continue
			}
			var kind meta.TypeMeta
			if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
				return nil, fmt.Errorf("%s: %w\n%s", name, err, doc)
			}
			types := map[string]any{
				"apps/v1 Deployment": new(apps.Deployment), "batch/v1 Job": new(batch.Job),
				"batch/v1 CronJob": new(batch.CronJob),
				"v1 ConfigMap":     new(core.ConfigMap), "v1 ServiceAccount": new(core.ServiceAccount),
				"policy/v1 PodDisruptionBudget":           new(policy.PodDisruptionBudget),
				"networking.k8s.io/v1 NetworkPolicy":      new(networking.NetworkPolicy),
				"monitoring.coreos.com/v1 PodMonitor":     new(monitoring.PodMonitor),
				"monitoring.coreos.com/v1 PrometheusRule": new(monitoring.PrometheusRule),
			}
			o, ok := types[kind.APIVersion+" "+kind.Kind]
			if !ok {
				return nil, fmt.Errorf("%s: a %s %s", name, kind.APIVersion, kind.Kind)
			}
			if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
				return nil, fmt.Errorf("%s: %w\n%s", name, err, doc)
			}
			objects = append(objects, o)
		}
	}
	return objects, nil
}

// only returns the objects of a type.
func only[T any](objects []any) (found []*T) {
	for _, o := range objects {
		if o, ok := o.(*T); ok {
			found = append(found, o)
		}
	}
	return found
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := chartloader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// outflow is the built program.
func outflow(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("OUTFLOW_TEST_BINARY"); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "outflow")
	build := exec.CommandContext(t.Context(), "go", "-C", "..", "build", "-o", path, "./cmd/outflow")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// accept fails the test unless outflow takes a configuration.
func accept(t *testing.T, program, config string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "outflow.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	check := exec.CommandContext(t.Context(), program, "config", "--config", file)
	check.Env = []string{}
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v: %s\n%s", err, out, config)
	}
}

// TestTheChartMakesWhatKubernetesAndOutflowAccept: with each set of values the chart passes helm lint, its
// objects are valid, and every configuration in them is one that outflow takes.
func TestTheChartMakesWhatKubernetesAndOutflowAccept(t *testing.T) {
	program := outflow(t)
	for name, outflows := range map[string]int{"minimal": 1, "shards": 2, "everything": 1} {
		loops := map[string]int{"everything": 1}[name] // of outflow maintain
		cron := map[string]int{"shards": 2}[name]
		t.Run(name, func(t *testing.T) {
			v := values(t, name)
			for _, m := range lint.All(chartDir, v, "ns", true).Messages {
				if m.Severity >= support.WarningSev {
					t.Error(m)
				}
			}
			objects, err := render(load(t), v)
			if err != nil {
				t.Fatal(err)
			}
			configs := map[string]string{}
			for _, c := range only[core.ConfigMap](objects) {
				configs[c.Name] = c.Data["outflow.yaml"]
				accept(t, program, c.Data["outflow.yaml"])
			}
			deployments := only[apps.Deployment](objects)
			if len(deployments) != outflows+loops ||
				len(only[policy.PodDisruptionBudget](objects)) != outflows {
				t.Errorf("%d deployments", len(deployments))
			}
			jobs := only[batch.CronJob](objects)
			if len(jobs) != cron {
				t.Errorf("%d cron jobs", len(jobs))
			}
			for _, j := range jobs {
				checkMaintainOnce(t, j, configs)
			}
			selected := map[string]bool{}
			for _, d := range deployments {
				pod := d.Spec.Template
				for label, value := range d.Spec.Selector.MatchLabels {
					if pod.Labels[label] != value {
						t.Errorf("%s does not select its own pods: %s", d.Name, label)
					}
				}
				selected[fmt.Sprint(d.Spec.Selector.MatchLabels)] = true
				checkPod(t, pod.Spec, configs)
				main := pod.Spec.Containers[0]
				for _, probe := range []*core.Probe{main.StartupProbe, main.LivenessProbe} {
					if probe.HTTPGet.Path != "/healthz" {
						t.Errorf("a probe that restarts the pod asks %s", probe.HTTPGet.Path)
					}
				}
				if main.ReadinessProbe.HTTPGet.Path != "/readyz" ||
					main.TerminationMessagePolicy != core.TerminationMessageFallbackToLogsOnError {
					t.Errorf("%+v", main)
				}
				listen, command := "OUTFLOW_LISTEN", "run"
				if strings.HasSuffix(d.Name, "-maintain") {
					listen, command = "OUTFLOW_MAINTAIN_LISTEN", "maintain"
				}
				if at := fmt.Sprintf("0.0.0.0:%d", main.Ports[0].ContainerPort); main.Env[0].Value != at ||
					main.Env[0].Name != listen || main.Args[0] != command {
					t.Errorf("%v listens on %v, not %s", main.Args, main.Env[0], at)
				}
				if !strings.Contains(configs[d.Name], "on_fault: hold\n") {
					t.Errorf("%s", configs[d.Name])
				}
			}
			if len(selected) != outflows+loops {
				t.Errorf("%d deployments share their pods: %v", outflows, selected)
			}
			for _, j := range only[batch.Job](objects) {
				checkPod(t, j.Spec.Template.Spec, configs)
			}
		})
	}
}

// checkMaintainOnce fails the test unless a job runs outflow maintain once, with what it needs.
func checkMaintainOnce(t *testing.T, j *batch.CronJob, configs map[string]string) {
	t.Helper()
	pod := j.Spec.JobTemplate.Spec.Template.Spec
	checkPod(t, pod, configs)
	if args := pod.Containers[0].Args; len(args) < 2 || args[0] != "maintain" || args[1] != "--once" ||
		j.Spec.ConcurrencyPolicy != batch.ForbidConcurrent || pod.RestartPolicy != core.RestartPolicyNever ||
		*j.Spec.JobTemplate.Spec.BackoffLimit != 0 {
		t.Errorf("%+v", j.Spec)
	}
	if !slices.ContainsFunc(pod.Volumes, func(v core.Volume) bool {
		return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == "outflow-archive"
	}) {
		t.Errorf("no archive: %+v", pod.Volumes)
	}
}

// TestTheExampleOfACronJobIsValid: it is for those who do without the chart.
func TestTheExampleOfACronJobIsValid(t *testing.T) {
	text, err := os.ReadFile("kubernetes/outflow-maintain-cronjob.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var j batch.CronJob
	if err := yaml.UnmarshalStrict(text, &j); err != nil {
		t.Fatal(err)
	}
	checkMaintainOnce(t, &j, nil)
}

// checkPod fails the test if a pod may do more than it needs, or mounts what is not there.
func checkPod(t *testing.T, pod core.PodSpec, configs map[string]string) {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
		if v.ConfigMap != nil && configs[v.ConfigMap.Name] == "" {
			t.Errorf("no ConfigMap %s", v.ConfigMap.Name)
		}
	}
	for _, c := range pod.Containers {
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("no volume %s", m.Name)
			}
		}
		s := c.SecurityContext
		if s == nil || !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation ||
			s.Capabilities.Drop[0] != "ALL" ||
			!*pod.SecurityContext.RunAsNonRoot || *pod.AutomountServiceAccountToken ||
			c.Resources.Limits.Memory().IsZero() {
			t.Errorf("%s may do more than it needs: %+v", c.Name, c)
		}
	}
}

func TestTheChartTakesAllThatItsValuesSay(t *testing.T) {
	c := load(t)
	v := values(t, "everything")
	v["prometheusRule"] = map[string]any{"enabled": true}
	objects, err := render(c, v)
	if err != nil {
		t.Fatal(err)
	}
	deployments := only[apps.Deployment](objects)
	pod := deployments[slices.IndexFunc(deployments, func(d *apps.Deployment) bool {
		return d.Name == "rel-outflow"
	})].Spec.Template.Spec
	sources := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v core.Volume) bool {
		return v.Name == "secrets"
	})].Projected.Sources
	spill := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v core.Volume) bool { return v.Name == "spill" })]
	if len(sources) != 2 || sources[0].Secret.Name != "outflow-secrets" ||
		sources[1].ConfigMap.Name != "ca" ||
		spill.Ephemeral == nil || pod.PriorityClassName != "high" || pod.NodeSelector["disk"] != "ssd" ||
		pod.Containers[0].Image != "registry.example.org/outflow@sha256:"+strings.Repeat("0", 64) ||
		pod.Containers[0].Env[1].ValueFrom.SecretKeyRef.Key != "password" {
		t.Errorf("%+v", pod)
	}
	maintain := deployments[slices.IndexFunc(deployments, func(d *apps.Deployment) bool {
		return d.Name == "rel-outflow-maintain"
	})].Spec
	m := maintain.Template.Spec
	if *maintain.Replicas != 2 || m.ServiceAccountName != "outflow-archive" ||
		m.NodeSelector["disk"] != "hdd" || !strings.HasPrefix(m.Containers[0].Image,
		"registry.example.org/outflow-s3@") || m.Volumes[1].Projected.Sources[0].Secret.Name !=
		"outflow-maintain" || m.Containers[0].Env[2].Name != "OUTFLOW_CONSUMER_DATABASE" {
		t.Errorf("%+v", m)
	}
	jobs, egress := only[batch.Job](objects), only[networking.NetworkPolicy](objects)
	if len(jobs) != 1 || jobs[0].Annotations["helm.sh/hook"] == "" ||
		jobs[0].Spec.Template.Spec.Volumes[1].Projected.Sources[0].Secret.Name != "outflow-init" ||
		len(egress) != 1 || len(egress[0].Spec.Egress) != 1 || len(egress[0].Spec.PolicyTypes) != 2 {
		t.Errorf("%+v, %+v", jobs, egress)
	}
	rules := only[monitoring.PrometheusRule](objects)
	if len(only[monitoring.PodMonitor](objects)) != 1 || len(rules) != 1 ||
		!strings.Contains(rules[0].Spec.Groups[0].Rules[0].Annotations["summary"], "$labels.slot }}") {
		t.Errorf("%+v", rules)
	}
}

func TestTheChartRefusesValuesThatItDoesNotKnow(t *testing.T) {
	for name, v := range map[string]map[string]any{
		"replicas":  {"replicas": 3},
		"listen":    {"config": map[string]any{"listen": "127.0.0.1:1"}},
		"spill_dir": {"config": map[string]any{"reorder": map[string]any{"spill_dir": "/tmp"}}},
		"a shard":   {"shards": []any{map[string]any{"name": "S_0", "config": map[string]any{}}}},
		"spill":     {"spill": map[string]any{"type": "hostPath"}},
		"maintain":  {"config": map[string]any{"maintain": map[string]any{"listen": ":1"}}},
		"too short": {"terminationGracePeriodSeconds": 5},
	} {
		if _, err := render(load(t), v); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func TestThePackagesConfigurationIsAccepted(t *testing.T) {
	config, err := os.ReadFile("outflow.yaml")
	if err != nil {
		t.Fatal(err)
	}
	accept(t, outflow(t), string(config))
}

// noRegistry stands for every image: what is built on top of it is not looked at.
type noRegistry struct{}

func (noRegistry) ResolveImageConfig(_ context.Context, ref string, _ sourceresolver.Opt) (string,
	digest.Digest, []byte,
	error) {
	return ref, "", []byte(`{"os": "linux", "architecture": "amd64", "config": {}}`), nil
}

// TestTheDockerfileIsClean asks the linter of BuildKit, all its rules.
func TestTheDockerfileIsClean(t *testing.T) {
	content, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	content = append([]byte("# check=experimental=all\n"), content...)
	results, err := dockerfile2llb.DockerfileLint(t.Context(), content, dockerfile2llb.ConvertOpt{
		MetaResolver: noRegistry{},
		SourceMap:    &llb.SourceMap{Filename: "Dockerfile", Definition: &llb.Definition{}, Data: content},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range results.Warnings {
		t.Errorf("%s: %s", w.RuleName, w.Detail)
	}
	if results.Error != nil {
		t.Error(results.Error.Message)
	}
	if !bytes.Contains(content, []byte("\nUSER 65532:65532\n")) {
		t.Error("the image's user is not a number")
	}
}

// TestTheComposeFileIsValid reads it as Docker Compose does, by its schema.
func TestTheComposeFileIsValid(t *testing.T) {
	_, err := loader.LoadWithContext(t.Context(), compose.ConfigDetails{
		WorkingDir:  "..",
		ConfigFiles: []compose.ConfigFile{{Filename: "../docker-compose.yml"}},
		Environment: compose.Mapping{},
	}, func(o *loader.Options) { o.SetProjectName("outflow", true) })
	if err != nil {
		t.Fatal(err)
	}
}
