{{- define "outflow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* The Outflows: a list of name, shard and config. Without shards there is one. */ -}}
{{- define "outflow.all" -}}
{{- $fullname := include "outflow.fullname" . -}}
{{- $all := list -}}
{{- range .Values.shards -}}
{{- $all = append $all (dict "name" (printf "%s-%s" $fullname .name) "shard" .name "config" (default dict .config)) -}}
{{- end -}}
{{- toJson (default (list (dict "name" $fullname "shard" "" "config" dict)) $all) -}}
{{- end -}}

{{- define "outflow.config" -}}
{{- $chart := dict "on_fault" "hold" "log" (dict "format" "json") "reorder" (dict "spill_dir" "/spill") -}}
{{- mergeOverwrite $chart (deepCopy .root.Values.config) (deepCopy .one.config) (deepCopy (default dict .more)) | toYaml -}}
{{- end -}}

{{- define "outflow.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}{{ with .component }}-{{ . }}{{ end }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .one.shard }}
outflow/shard: {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* The pods with a port, of all shards. */ -}}
{{- define "outflow.served" -}}
matchLabels:
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/name, operator: In, values: [{{ .Chart.Name }}, {{ .Chart.Name }}-maintain]}
{{- end -}}

{{- define "outflow.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "outflow.selector" . }}
{{- end -}}

{{- define "outflow.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default (printf "v%s" $.Chart.AppVersion) .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "outflow.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "outflow.fullname" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end -}}
{{- end -}}

{{- /* The volume /secrets; secret is the name of the first one. */ -}}
{{- define "outflow.secrets" -}}
{{- if or .secret .root.Values.secretSources }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- with .secret }}
      - secret: {name: {{ . | quote }}}
      {{- end }}
      {{- with .root.Values.secretSources }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "outflow.pod" -}}
metadata:
  labels:
    {{- include "outflow.labels" . | nindent 4 }}
    {{- with .root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration makes new pods.
    outflow/config: {{ include "outflow.config" . | sha256sum }}
    {{- with .root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "outflow.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.topologySpread }}
  {{- if .enabled }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ .topologyKey }}
      whenUnsatisfiable: {{ .whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "outflow.selector" $ | nindent 10 }}
  {{- end }}
  {{- end }}
  containers:
    - name: outflow
      image: {{ include "outflow.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: [run, --config, /etc/outflow/outflow.yaml]
      env:
        # Not in the configuration: the image has this variable, which counts before a file.
        - {name: OUTFLOW_LISTEN, value: "0.0.0.0:{{ .root.Values.port }}"}
        {{- with .root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ .root.Values.port }}}
      startupProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .root.Values.probes.startup | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml .root.Values.probes.liveness | nindent 8 }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        {{- toYaml .root.Values.probes.readiness | nindent 8 }}
      resources:
        {{- toYaml .root.Values.resources | nindent 8 }}
      securityContext:
        {{- toYaml .root.Values.securityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: config, mountPath: /etc/outflow, readOnly: true}
        - {name: spill, mountPath: /spill}
        {{- if or .root.Values.existingSecret .root.Values.secretSources }}
        - {name: secrets, mountPath: /secrets, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ .one.name }}}
    - name: spill
      {{- with .root.Values.spill }}
      {{- if eq .type "pvc" }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            {{- with .storageClassName }}
            storageClassName: {{ . | quote }}
            {{- end }}
            resources: {requests: {storage: {{ .size }}}}
      {{- else }}
      emptyDir: {sizeLimit: {{ .size }}}
      {{- end }}
      {{- end }}
    {{- include "outflow.secrets" (dict "root" .root "secret" .root.Values.existingSecret) | nindent 4 }}
{{- end -}}

{{- define "outflow.maintainPod" -}}
{{- $v := .root.Values -}}
{{- $m := $v.maintain -}}
{{- $secret := default $v.existingSecret $m.existingSecret -}}
metadata:
  labels:
    {{- include "outflow.labels" . | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    outflow/config: {{ include "outflow.config" . | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $m.schedule }}
  restartPolicy: Never
  {{- end }}
  serviceAccountName: {{ default (include "outflow.serviceAccount" .root) $m.serviceAccountName }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  containers:
    - name: maintain
      image: {{ include "outflow.image" (dict "Values" (dict "image" (mergeOverwrite (deepCopy $v.image) $m.image)) "Chart" .root.Chart) }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args: [maintain, {{ if $m.schedule }}--once, {{ end }}--config, /etc/outflow/outflow.yaml]
      {{- if $m.schedule }}
      {{- with concat $v.extraEnv $m.extraEnv }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- else }}
      env:
        - {name: OUTFLOW_MAINTAIN_LISTEN, value: "0.0.0.0:{{ $v.port }}"}
        {{- with concat $v.extraEnv $m.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ $v.port }}}
      startupProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml $v.probes.startup | nindent 8 }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        {{- toYaml $v.probes.liveness | nindent 8 }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        {{- toYaml $v.probes.readiness | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $m.resources | nindent 8 }}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: config, mountPath: /etc/outflow, readOnly: true}
        {{- if $m.archiveClaim }}
        - {name: archive, mountPath: /archive}
        {{- end }}
        {{- if or $secret $v.secretSources }}
        - {name: secrets, mountPath: /secrets, readOnly: true}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ .one.name }}-maintain}
    {{- with $m.archiveClaim }}
    - name: archive
      persistentVolumeClaim: {claimName: {{ . | quote }}}
    {{- end }}
    {{- include "outflow.secrets" (dict "root" .root "secret" $secret) | nindent 4 }}
{{- end -}}
