{{/*
A Deployment of ours, or a LeaderWorkerSet where one model takes several machines (`nodes` of v), with everything that hangs on it: settings, account,
budget.
(root, role, pool, v: values of the part, image: key of images, settings: what the chart sets, ports: list of {name, containerPort},
 strategy, token: whether it may ask the API server, tokenizerOnly, weights: list of {model: values, name: where the pod has several}, where: path
 of the values, served: name of the model, where the release has several, public: Secret with the certificate that clients see)
*/}}
{{- define "rootward.workload" -}}
{{- $root := .root }}
{{- $v := .v }}
{{- $name := include "rootward.part" . }}
{{- $weights := list }}
{{- range .weights }}{{ $weights = append $weights (merge (dict "volume" (ternary (printf "model-%s" .name) "model" (not (empty .name))) "at" (ternary (printf "/models/%s" .name) "/models" (not (empty .name)))) .) }}{{ end }}
{{- $common := dict "model" (include "rootward.modelPath" (first .weights).model) "admin_listen" (include "rootward.listen" (dict "root" $root "port" 9090)) "shutdown_timeout_s" $v.drain.timeoutSeconds "log_level" $root.Values.global.logLevel "log_json" true "redis_prefix" (include "rootward.keyPrefix" $root | trim) }}
{{- $tls := include "rootward.tlsSettings" . | fromYaml }}
{{- $settings := mustMergeOverwrite (dict) $common $v.settings .settings $tls }}
{{- if hasKey $settings "models" }}{{ $settings = omit $settings "model" }}{{ end }}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "rootward.metadata" . | nindent 2 }}
data:
  settings.yaml: |
    {{- toYaml $settings | nindent 4 }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "rootward.metadata" . | nindent 2 }}
  {{- with $v.serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
---
{{- $nodes := int (get $v "nodes" | default 1) }}
{{- $pod := merge (dict "name" $name "weights" $weights "nodes" $nodes "checksum" (toYaml $settings | sha256sum)) . }}
apiVersion: {{ include "rootward.controllerVersion" $v }}
kind: {{ include "rootward.controller" $v }}
metadata:
  {{- include "rootward.metadata" . | nindent 2 }}
  {{- if and (gt $nodes 1) $v.exclusiveTopology }}
  annotations:
    leaderworkerset.sigs.k8s.io/exclusive-topology: {{ $v.exclusiveTopology }}
  {{- end }}
spec:
  {{- if hasKey $v "autoscaling" }}
  {{- include "rootward.replicas" (dict "root" $root "v" $v "name" $name) | trim | nindent 2 }}
  {{- else }}
  replicas: {{ $v.replicas }}
  {{- end }}
  {{- if gt $nodes 1 }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml .strategy | nindent 6 }}
  networkConfig: {subdomainPolicy: UniquePerReplica}  # the service of this name is ours, and lists machines that are ready
  leaderWorkerTemplate:
    size: {{ $nodes }}
    restartPolicy: RecreateGroupAfterStart  # while a machine still downloads, another that failed is started alone
    workerTemplate:
      {{- include "rootward.podTemplate" $pod | trim | nindent 6 }}
  {{- else }}
  revisionHistoryLimit: 5
  progressDeadlineSeconds: {{ add (mul 10 $v.probes.startupFailureThreshold) 300 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml .strategy | nindent 6 }}
  selector:
    matchLabels:
      {{- include "rootward.selector" . | nindent 6 }}
  template:
    {{- include "rootward.podTemplate" $pod | trim | nindent 4 }}
  {{- end }}
{{- if and $v.pdb.enabled (gt (int (include "rootward.mostReplicas" $v)) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "rootward.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ $v.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "rootward.selector" . | nindent 6 }}  # of several machines that share a model all: losing one ends the group
{{- end }}
{{- end }}

{{/* Pods of a workload: as `rootward.workload`, and name, weights, nodes, checksum of the settings */}}
{{- define "rootward.podTemplate" -}}
{{- $root := .root }}
{{- $v := .v }}
{{- $image := mustMergeOverwrite (deepCopy (index $root.Values.image .image)) (deepCopy $v.image) }}
{{- $ref := include "rootward.image" (dict "root" $root "image" $image "registry" $root.Values.global.imageRegistry "ours" true) }}
{{- $where := .where | default .role }}
metadata:
  labels:
    {{- include "rootward.podLabels" . | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- /* One mapping, in which the chart's own win: a key that stands twice is no YAML. */}}
  {{- $own := dict "kubectl.kubernetes.io/default-container" .role "checksum/settings" .checksum }}
  {{- with .served }}
  {{- $_ := set $own "rootward.dev/model" . }}
  {{- end }}
  annotations:
    {{- toYaml (merge $own $v.podAnnotations) | nindent 4 }}
spec:
  serviceAccountName: {{ .name }}
  automountServiceAccountToken: {{ .token }}
  terminationGracePeriodSeconds: {{ include "rootward.grace" (dict "v" $v "where" $where) }}
  {{- include "rootward.podSpec" . | nindent 2 }}
  {{- if eq (int .nodes) 1 }}
  topologySpreadConstraints:
    {{- include "rootward.spread" . | nindent 4 }}
  {{- end }}
  {{- /* A LeaderWorkerSet would take a container that was started again for a failure of the whole group. */}}
  {{- $attempts := ternary 100 0 (gt (int .nodes) 1) }}
  {{- $downloads := list }}
  {{- range .weights }}{{ $downloads = append $downloads (include "rootward.download" (merge (dict "root" $root "v" $v "image" $ref "pullPolicy" $image.pullPolicy "tokenizerOnly" $.tokenizerOnly "attempts" $attempts) .)) }}{{ end }}
  {{- with join "" $downloads | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ $ref }}
      imagePullPolicy: {{ $image.pullPolicy }}
      args: [serve, {{ .role }}, --config, /etc/rootward/settings.yaml{{ if gt (int .nodes) 1 }}, --node-rank, $(LWS_WORKER_INDEX), --master-addr, $(LWS_LEADER_ADDRESS){{ end }}]
      env:
        - {name: HF_HUB_OFFLINE, value: "1"}
        - {name: HOME, value: /tmp}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "rootward.redisEnv" . | trim | nindent 8 }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range .ports }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
        - {name: admin, containerPort: 9090}
      {{- include "rootward.probes" $v.probes | nindent 6 }}
      {{- if $v.drain.preStopSleepSeconds }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ $v.drain.preStopSleepSeconds }}
      {{- end }}
      {{- with $v.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "rootward.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/rootward/settings.yaml, subPath: settings.yaml, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- range .weights }}
        {{- if ne .model.source "spec" }}
        - {name: {{ .volume }}, mountPath: {{ .at }}, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if get $v "shm" }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if ne $root.Values.tls.mode "none" }}
        - {name: tls, mountPath: /etc/rootward/tls, readOnly: true}
        {{- end }}
        {{- if .public }}
        - {name: public, mountPath: /etc/rootward/public, readOnly: true}
        {{- end }}
        {{- if dig "auth" "existingSecret" "" $v }}
        - {name: keys, mountPath: /etc/rootward/keys, readOnly: true}
        {{- end }}
        {{- if $root.Values.redis.external.caSecret }}
        - {name: redis-ca, mountPath: /etc/rootward/redis, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $v.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: settings
      configMap:
        name: {{ .name }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $root.Values.global.tmpSizeLimit }}}
    {{- range .weights }}
    {{- with include "rootward.modelVolume" (dict "volume" .volume "model" .model "tokenizerOnly" $.tokenizerOnly) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with get $v "shm" }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ . }}
    {{- end }}
    {{- if ne $root.Values.tls.mode "none" }}
    - name: tls
      secret:
        secretName: {{ include "rootward.tlsSecret" . }}
        defaultMode: 0440
    {{- end }}
    {{- with .public }}
    - name: public
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with dig "auth" "existingSecret" "" $v }}
    - name: keys
      secret:
        secretName: {{ . }}
        items: [{key: keys.yaml, path: keys.yaml}]
        defaultMode: 0440
    {{- end }}
    {{- with $root.Values.redis.external.caSecret }}
    - name: redis-ca
      secret:
        secretName: {{ . }}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What runs a part: (its values) → API version, kind */}}
{{- define "rootward.controllerVersion" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (gt (int (get . "nodes" | default 1)) 1) }}
{{- end }}
{{- define "rootward.controller" -}}
{{ ternary "LeaderWorkerSet" "Deployment" (gt (int (get . "nodes" | default 1)) 1) }}
{{- end }}

{{/* Of the machines that share a model only the first is called: (values) → its label */}}
{{- define "rootward.leads" -}}
{{- if gt (int (get . "nodes" | default 1)) 1 }}leaderworkerset.sigs.k8s.io/worker-index: "0"{{ end }}
{{- end }}

{{- define "rootward.leastReplicas" -}}
{{- if and (hasKey . "autoscaling") (ne (dig "autoscaling" "mode" "none" .) "none") }}{{ .autoscaling.minReplicas }}{{ else }}{{ .replicas }}{{ end }}
{{- end }}

{{- define "rootward.mostReplicas" -}}
{{- if and (hasKey . "autoscaling") (ne (dig "autoscaling" "mode" "none" .) "none") }}{{ .autoscaling.maxReplicas }}{{ else }}{{ .replicas }}{{ end }}
{{- end }}

{{/* A headless service for peers that dial pods: (root, role, pool, port, v: values of the part) */}}
{{- define "rootward.headless" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "rootward.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector:
    {{- include "rootward.selector" . | nindent 4 }}
    {{- with include "rootward.leads" .v }}
    {{- . | nindent 4 }}
    {{- end }}
  ports:
    - {name: grpc, port: {{ .port }}, targetPort: grpc, appProtocol: {{ include "rootward.grpcProtocol" .root }}}
{{- end }}
