{{/* What every pod of ours has in common. */}}

{{/* (root, v: values of the part) */}}
{{- define "rootward.containerSecurity" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.global.containerSecurityContext) (deepCopy .v.securityContext) | toYaml -}}
{{- end }}

{{/* Fields of the spec of every pod: what it may do, where it runs, how its images are pulled. (root, v: values of the part) */}}
{{- define "rootward.podSpec" -}}
{{- $v := .v -}}
enableServiceLinks: false
securityContext:
  {{- mustMergeOverwrite (deepCopy .root.Values.global.podSecurityContext) (deepCopy $v.podSecurityContext) | toYaml | nindent 2 }}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "affinity" "priorityClassName" "schedulerName" "runtimeClassName" "resourceClaims" }}
{{- with get $v $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with include "rootward.tolerations" $v | fromYamlArray }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, port) → address to listen on */}}
{{- define "rootward.listen" -}}
{{ ternary "[::]" "0.0.0.0" .root.Values.global.ipv6 }}:{{ .port }}
{{- end }}

{{- define "rootward.probes" -}}
startupProbe:
  httpGet: {path: /health/startup, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .startupFailureThreshold }}
readinessProbe:
  httpGet: {path: /health/ready, port: admin}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .livenessFailureThreshold }}
{{- end }}

{{/* Where a model is downloaded from; empty if it is not */}}
{{- define "rootward.modelUrl" -}}
{{- if eq .source "hf" }}hf://{{ required "model.repo: is empty, and source is hf" .repo }}@{{ .revision }}{{ else if eq .source "url" }}{{ required "model.url: is empty, and source is url" .url | trimSuffix "/" }}{{ end -}}
{{- end }}

{{/* Folder of a downloaded model: one for each address and revision, since a cache holds several */}}
{{- define "rootward.modelFolder" -}}
{{ regexReplaceAll "[^A-Za-z0-9._-]+" (include "rootward.modelUrl" .) "--" }}
{{- end }}

{{/* What the model setting is called, for a source; below the name of the model, where a pod has several */}}
{{- define "rootward.modelPath" -}}
{{- if eq .source "spec" }}{{ required "model.spec: is empty" .spec }}{{ else }}/models{{ with .name }}/{{ . }}{{ end }}{{ if include "rootward.modelUrl" . }}/{{ include "rootward.modelFolder" . }}{{ end }}{{ with .subPath }}/{{ . }}{{ end }}{{ end }}
{{- end }}

{{/* (volume, model, tokenizerOnly: downloads are small and not kept) */}}
{{- define "rootward.modelVolume" -}}
{{- $cache := ternary dict (.model.cache | default dict) (or .tokenizerOnly (not (include "rootward.modelUrl" .model))) -}}
{{- if and $cache.claim $cache.hostPath }}{{ fail "model.cache: claim and hostPath are both given; name one" }}{{ end -}}
{{- if or $cache.claim (eq .model.source "pvc") }}
- name: {{ .volume }}
  persistentVolumeClaim:
    claimName: {{ $cache.claim | default .model.claim | required "model.claim: is empty, and source is pvc" }}
    {{- if not $cache.claim }}
    readOnly: true
    {{- end }}
{{- else if or $cache.hostPath (eq .model.source "host") }}
- name: {{ .volume }}
  hostPath:
    path: {{ $cache.hostPath | default .model.hostPath | required "model.hostPath: is empty, and source is host" }}
    type: Directory
{{- else if include "rootward.modelUrl" .model }}
- name: {{ .volume }}
  emptyDir:
    sizeLimit: {{ ternary "1Gi" .model.sizeLimit (.tokenizerOnly | default false) }}
{{- else if eq .model.source "image" }}
- name: {{ .volume }}
  image:
    reference: {{ required "model.image: is empty, and source is image" .model.image | quote }}
    pullPolicy: IfNotPresent
{{- end }}
{{- end }}

{{/* An init container, if the source is downloaded: (root, v: values of the part, model, volume, image, tokenizerOnly, attempts) */}}
{{- define "rootward.download" -}}
{{- if include "rootward.modelUrl" .model }}
{{- $kept := and (not .tokenizerOnly) (or .model.cache.claim .model.cache.hostPath) }}
- name: {{ .volume | replace "model" "download" }}
  image: {{ .image }}
  imagePullPolicy: {{ .pullPolicy }}
  args: [download, {{ include "rootward.modelUrl" .model | quote }}, /models/{{ include "rootward.modelFolder" .model }}{{ if .tokenizerOnly }}, --tokenizer-only{{ end }}{{ with .attempts }}, --attempts, {{ . | quote }}{{ end }}]
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/hf}
    - {name: HF_HUB_OFFLINE, value: "0"}  # the image says 1: services never download
    - {name: HF_XET_CHUNK_CACHE_SIZE_BYTES, value: "0"}  # chunks of a download would be kept in /tmp, beyond its limit
    {{- with .root.Values.global.downloadEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if and .model.secret (eq .model.source "hf") }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .model.secret }}
          key: token
    {{- end }}
  {{- if and .model.secret (eq .model.source "url") }}
  envFrom:
    - secretRef:
        name: {{ .model.secret }}
  {{- end }}
  {{- /* The kubelet evicts a pod whose volumes exceed the largest limit of its containers: what is downloaded into one counts. */}}
  resources:
    requests: {cpu: 500m, memory: 1Gi, ephemeral-storage: 64Mi}
    limits: {memory: 4Gi, ephemeral-storage: {{ ternary "4Gi" .model.sizeLimit (or (.tokenizerOnly | default false) (not (empty $kept))) }}}
  securityContext:
    {{- include "rootward.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: {{ .volume }}, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "rootward.tolerations" -}}
{{- $own := list -}}
{{- if .gpuToleration }}{{ $own = append $own (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}{{ end -}}
{{- if .spot -}}
{{- range $key := list "cloud.google.com/gke-spot" "kubernetes.azure.com/scalesetpriority" "rootward.dev/spot" }}{{ $own = append $own (dict "key" $key "operator" "Exists" "effect" "NoSchedule") }}{{ end -}}
{{- end -}}
{{- toYaml (concat $own .tolerations) -}}
{{- end }}

{{- define "rootward.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "rootward.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* Secret with the certificate of a role */}}
{{- define "rootward.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- if eq $tls.mode "existingSecret" -}}
{{ required (printf "tls.existingSecrets.%s: is empty, and tls.mode is existingSecret" .role) (get $tls.existingSecrets .role) }}
{{- else -}}
{{ include "rootward.name" .root }}-{{ .role }}-tls
{{- end -}}
{{- end }}

{{/* Names that clients outside the cluster dial, as JSON */}}
{{- define "rootward.publicNames" -}}
{{- $route := .Values.gateway.route -}}
{{- $names := concat $route.hostnames $route.grpcHostnames -}}
{{- if .Values.gateway.ingress.enabled }}{{ $names = append $names .Values.gateway.ingress.host }}{{ end -}}
{{- .Values.tls.public.hostnames | default ($names | uniq) | toJson -}}
{{- end }}

{{/* Secret with the certificate that clients see, where it is not the one that other roles see */}}
{{- define "rootward.publicSecret" -}}
{{- $public := .Values.tls.public -}}
{{- if and (ne .Values.tls.mode "none") (or $public.secret $public.issuerRef) -}}
{{- if not (include "rootward.publicNames" . | fromJsonArray) }}{{ fail "tls.public.hostnames: is empty, and no route or Ingress has a name; name what clients dial" }}{{ end -}}
{{ $public.secret | default (printf "%s-public-tls" (include "rootward.name" .)) }}
{{- end -}}
{{- end }}

{{/* The name in certificates of a role: (root, role) */}}
{{- define "rootward.identity" -}}
spiffe://{{ .root.Values.tls.trustDomain }}/ns/{{ .root.Release.Namespace }}/sa/{{ include "rootward.name" .root }}-{{ .role }}
{{- end }}

{{/* Settings of mutual TLS, for the file of a role: a drafter admits verifiers alone, a verifier gateways alone. */}}
{{- define "rootward.tlsSettings" -}}
{{- if ne .root.Values.tls.mode "none" }}
{{- $full := include "rootward.name" .root }}
tls_certificate: /etc/rootward/tls/tls.crt
tls_key: /etc/rootward/tls/tls.key
tls_authority: /etc/rootward/tls/ca.crt
{{- if eq .role "gateway" }}
tls_server_name: {{ $full }}-verifier
{{- if include "rootward.publicSecret" .root }}
public_tls_certificate: /etc/rootward/public/tls.crt
public_tls_key: /etc/rootward/public/tls.key
{{- end }}
{{- else if eq .role "verifier" }}
tls_server_name: {{ $full }}-drafter
tls_peers: [{{ include "rootward.identity" (dict "root" .root "role" "gateway") }}]
{{- else }}
tls_peers: [{{ include "rootward.identity" (dict "root" .root "role" "verifier") }}]
{{- end }}
{{- end }}
{{- end }}

{{/* While an autoscaler decides: the number that runs now, since a field that is dropped falls back to 1. Nothing when there is no cluster to ask. */}}
{{- define "rootward.replicas" -}}
{{- if eq .v.autoscaling.mode "none" }}
replicas: {{ .v.replicas }}
{{- else if .root.Release.IsUpgrade }}
{{- with lookup (include "rootward.controllerVersion" .v) (include "rootward.controller" .v) .root.Release.Namespace .name }}
replicas: {{ .spec.replicas }}
{{- end }}
{{- end }}
{{- end }}
