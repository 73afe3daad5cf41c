{{/* Names, labels, images. */}}

{{- define "rootward.name" -}}
{{- if contains "rootward" .Release.Name }}{{ .Release.Name | trunc 30 | trimSuffix "-" }}{{ else }}{{ printf "%s-rootward" (.Release.Name | trunc 21 | trimSuffix "-") }}{{ end }}
{{- end }}

{{/* (root, role, pool) → name of the objects of a part */}}
{{- define "rootward.part" -}}
{{ include "rootward.name" .root }}-{{ .role }}{{ with .pool }}-{{ . }}{{ end }}
{{- end }}

{{- define "rootward.selector" -}}
app.kubernetes.io/name: rootward
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- with .pool }}
rootward.dev/pool: {{ . }}
{{- end }}
{{- end }}

{{/* (ports) → of a rule of a NetworkPolicy */}}
{{- define "rootward.tcp" -}}
{{- $ports := list -}}
{{- range . }}{{ $ports = append $ports (dict "protocol" "TCP" "port" (int .)) }}{{ end -}}
{{- toJson $ports -}}
{{- end }}

{{/* Pods of a role, as a peer in a NetworkPolicy */}}
{{- define "rootward.peer" -}}
podSelector: {matchLabels: {{ include "rootward.selector" . | fromYaml | toJson }}}
{{- end }}

{{- define "rootward.labels" -}}
{{ include "rootward.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: rootward
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.global.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of pod templates: nothing that changes with the chart's version, or every upgrade would restart Redis and the GPUs. */}}
{{- define "rootward.podLabels" -}}
{{ include "rootward.selector" . }}
app.kubernetes.io/part-of: rootward
{{- with .root.Values.global.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "rootward.metadata" -}}
name: {{ .name | default (include "rootward.part" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "rootward.labels" . | nindent 2 }}
{{- end }}

{{/* First part of the keys in Redis. One that releases may share needs one for each. */}}
{{- define "rootward.keyPrefix" -}}
{{- if .Values.redis.keyPrefix }}{{ .Values.redis.keyPrefix }}
{{- else if eq .Values.redis.mode "single" }}rw
{{- else }}
{{- $own := printf "rw-%s-%s" .Release.Namespace .Release.Name -}}
{{ ternary $own (printf "rw-%s" (sha256sum $own | trunc 32)) (le (len $own) 64) }}
{{- end }}
{{- end }}

{{/* Port of a URL: (url, plain: that of http without one) */}}
{{- define "rootward.port" -}}
{{- $port := regexFind ":[0-9]+$" (urlParse .url).host | trimPrefix ":" -}}
{{ $port | default (ternary "443" .plain (hasPrefix "https://" .url)) }}
{{- end }}

{{/* Ports that downloads call, as JSON: 443, and those of proxies and endpoints in their variables */}}
{{- define "rootward.downloadPorts" -}}
{{- $ports := list 443 -}}
{{- range .Values.global.downloadEnv -}}
{{- $url := .value | default "" -}}
{{- if and $url (regexMatch "(?i)^(https?|all)_proxy$" .name) (not (contains "://" $url)) }}{{ $url = printf "http://%s" $url }}{{ end -}}
{{- if contains "://" $url }}{{ $ports = append $ports (include "rootward.port" (dict "url" $url "plain" "80") | int) }}{{ end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{/* appProtocol of a gRPC port: plain HTTP/2, or TLS, where HTTP/2 is agreed on in the handshake */}}
{{- define "rootward.grpcProtocol" -}}
{{ ternary "kubernetes.io/h2c" "https" (eq .Values.tls.mode "none") }}
{{- end }}

{{/* (root, image) → reference; the digest wins */}}
{{- define "rootward.image" -}}
{{- $registry := .registry | default "" -}}
{{- if and .ours (not $registry) (not (contains "." (first (splitList "/" .image.repository)))) }}{{ fail "global.imageRegistry: is empty; name the registry that holds your build of the images (docs/operations/images.md)" }}{{ end -}}
{{- $repository := ternary .image.repository (printf "%s/%s" (trimSuffix "/" $registry) .image.repository) (empty $registry) -}}
{{- if .image.digest }}{{ $repository }}@{{ .image.digest }}{{ else }}{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/*
The models of a release, as a YAML list of {name: in names of objects, "" where there is one model, served: what clients call it, verifier,
tokenizer: where gateways read it, pools: name → pool}. The pools of one of several models have its name before their own.
*/}}
{{- define "rootward.models" -}}
{{- $root := . -}}
{{- $one := dict "name" "" "servedModelName" .Values.servedModelName "drafter" .Values.drafter "tokenizer" .Values.gateway.tokenizer -}}
{{- if and .Values.models (or .Values.discovery.verifiers .Values.discovery.drafters) }}{{ fail "discovery.verifiers, discovery.drafters: belong to one model, and models has several; leave one of them empty" }}{{ end -}}
{{- $models := list -}}
{{- $taken := dict "name" dict "served" dict "pool" dict -}}
{{- range $m := .Values.models | default (list $one) -}}
{{- $verifier := mustMergeOverwrite (deepCopy $root.Values.verifier) (deepCopy ($m.verifier | default dict)) -}}
{{- $w := $verifier.model -}}
{{- $pools := dict -}}
{{- range $pool, $given := dig "drafter" "pools" dict $m -}}
{{- $full := ternary (printf "%s-%s" $m.name $pool) $pool (not (empty $m.name)) -}}
{{- if gt (len $full) 22 }}{{ fail (printf "models.%s.drafter.pools.%s: model and pool have %d letters together; objects of Kubernetes take 21" $m.name $pool (sub (len $full) 1)) }}{{ end -}}
{{- if hasKey $taken.pool $full }}{{ fail (printf "models.%s.drafter.pools.%s: objects would be named %s, as those of models.%s; rename one" $m.name $pool $full (get $taken.pool $full)) }}{{ end -}}
{{- $_ := set $taken.pool $full (printf "%s.drafter.pools.%s" $m.name $pool) -}}
{{- $where := ternary (printf "models.%s.drafter.pools.%s" $m.name $pool) (printf "drafter.pools.%s" $pool) (not (empty $m.name)) -}}
{{- $_ := set $pools $full (include "rootward.pool" (dict "root" $root "where" $where "given" $given) | fromYaml) -}}
{{- end -}}
{{- $last := get (dict "hf" $w.repo "url" (trimSuffix "/" $w.url)) $w.source | default (include "rootward.modelPath" $w) | base -}}
{{- $served := $m.servedModelName | default $m.name | default $last -}}
{{- if hasKey $taken.name $m.name }}{{ fail (printf "models.%s: two models have this name; rename one" $m.name) }}{{ end -}}
{{- if hasKey $taken.served $served }}{{ fail (printf "models.%s: clients call it %s, as models.%s; give it another servedModelName" $m.name $served (get $taken.served $served)) }}{{ end -}}
{{- $_ := set $taken.name $m.name true -}}
{{- $_ := set $taken.served $served $m.name -}}
{{- $own := mustMergeOverwrite (deepCopy $root.Values.gateway.tokenizer) (deepCopy ($m.tokenizer | default dict)) -}}
{{- $at := ternary (printf "models.%s.tokenizer" $m.name) "gateway.tokenizer" (not (empty $m.name)) -}}
{{- if and (empty $own.source) (has $w.source (list "pvc" "image" "host")) }}{{ fail (printf "%s.source: is empty, and gateways would mount the weights (verifier.model.source is %s); name a folder or repository of tokenizer files, or the weights themselves" $at $w.source) }}{{ end -}}
{{- $tokenizer := ternary $w $own (empty $own.source) -}}
{{- $models = append $models (dict "name" $m.name "served" $served "verifier" $verifier "tokenizer" $tokenizer "pools" $pools) -}}
{{- end -}}
{{- toYaml $models -}}
{{- end }}

{{/* Pools of all models, as YAML: name → pool */}}
{{- define "rootward.pools" -}}
{{- $pools := dict -}}
{{- range include "rootward.models" . | fromYamlArray }}{{ $pools = merge $pools .pools }}{{ end -}}
{{- toYaml $pools -}}
{{- end }}

{{/* A pool: the defaults with what differs on top, checked for what a schema cannot say. As YAML. */}}
{{- define "rootward.pool" -}}
{{- $pool := mustMergeOverwrite (deepCopy .root.Values.drafter.defaults) (deepCopy (.given | default dict)) -}}
{{- $where := .where -}}
{{- $a := $pool.autoscaling -}}
{{- if and (eq $a.mode "hpa") (lt (int $a.minReplicas) 1) }}{{ fail (printf "%s.autoscaling.minReplicas: 0 needs mode keda or keda-push; an HPA cannot scale to zero" $where) }}{{ end -}}
{{- if gt (int $a.minReplicas) (int $a.maxReplicas) }}{{ fail (printf "%s.autoscaling.minReplicas: %d is above maxReplicas %d" $where (int $a.minReplicas) (int $a.maxReplicas)) }}{{ end -}}
{{- if le (float64 $a.guardUtilization) (float64 $a.targetUtilization) }}{{ fail (printf "%s.autoscaling.guardUtilization: %v must be above targetUtilization %v, or the guard is the signal" $where $a.guardUtilization $a.targetUtilization) }}{{ end -}}
{{- if and (eq $a.mode "keda-push") (not .root.Values.gateway.scaler.port) }}{{ fail (printf "%s.autoscaling.mode: keda-push needs gateway.scaler.port, for example 50053" $where) }}{{ end -}}
{{- toYaml (set $pool "where" $where) -}}
{{- end }}

{{- define "rootward.grace" -}}
{{- $grace := add .v.drain.preStopSleepSeconds .v.drain.timeoutSeconds .v.drain.marginSeconds -}}
{{- if gt (int $grace) 600 }}{{ fail (printf "%s.drain: %d s in all are more than 600 s; cluster autoscalers do not wait that long" .where (int $grace)) }}{{ end -}}
{{- $grace -}}
{{- end }}
