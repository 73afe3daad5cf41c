{{/* Who finds whom, as entries of the services' settings. */}}

{{/* Variables that carry the address of Redis with its password: (root, role) */}}
{{- define "rootward.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- if eq $redis.mode "single" }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.auth.existingSecret | default (printf "%s-redis" (include "rootward.name" .root)) }}
      key: {{ .role }}
- name: ROOTWARD_REDIS_URL
  {{- $host := printf "%s-redis.%s.svc:6379/0" (include "rootward.name" .root) .root.Release.Namespace }}
  {{- if eq .root.Values.tls.mode "none" }}
  value: redis://{{ .role }}:$(REDIS_PASSWORD)@{{ $host }}
  {{- else }}
  value: rediss://{{ .role }}:$(REDIS_PASSWORD)@{{ $host }}?ssl_ca_certs=/etc/rootward/tls/ca.crt
  {{- end }}
{{- else if $redis.external.existingSecret }}
- name: ROOTWARD_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.existingSecret }}
      key: {{ ternary .role $redis.external.urlKey $redis.external.perRole }}
{{- else }}
- name: ROOTWARD_REDIS_URL
  value: {{ required "redis.external.url: is empty; give it, or redis.external.existingSecret" $redis.external.url | quote }}
{{- end }}
{{- end }}

{{/* Entries of `verifiers` of a model (gateway), as JSON: (root, model) */}}
{{- define "rootward.verifiers" -}}
{{- $mode := .root.Values.discovery.mode -}}
{{- $service := printf "%s.%s" (include "rootward.part" (dict "root" .root "role" "verifier" "pool" .model.name)) .root.Release.Namespace -}}
{{- $own := list -}}
{{- if eq $mode "redis" }}{{ $own = list (printf "redis:%s" .model.served) }}
{{- else if eq $mode "kubernetes" }}{{ $own = list (printf "kubernetes:%s:grpc" $service) }}
{{- else if eq $mode "dns" }}{{ $own = list (printf "dns:%s.svc:50052" $service) }}{{ end -}}
{{- $all := concat $own .root.Values.discovery.verifiers -}}
{{- if not $all }}{{ fail "discovery.verifiers: is empty, and mode static has no other; give host:port" }}{{ end -}}
{{- toJson $all -}}
{{- end }}

{{/* Entries of `drafters` (verifier), as JSON: (root, pools) */}}
{{- define "rootward.drafters" -}}
{{- $mode := .root.Values.discovery.mode -}}
{{- $own := list -}}
{{- range $pool, $_ := .pools }}
{{- $service := printf "%s.%s" (include "rootward.part" (dict "root" $.root "role" "drafter" "pool" $pool)) $.root.Release.Namespace -}}
{{- if eq $mode "redis" }}{{ $own = append $own (printf "%s=redis:%s" $pool $pool) }}
{{- else if eq $mode "kubernetes" }}{{ $own = append $own (printf "%s=kubernetes:%s:grpc" $pool $service) }}
{{- else if eq $mode "dns" }}{{ $own = append $own (printf "%s=dns:%s.svc:50061" $pool $service) }}{{ end -}}
{{- end -}}
{{- concat $own .root.Values.discovery.drafters | default list | toJson -}}
{{- end }}
