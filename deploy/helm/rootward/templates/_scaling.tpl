{{/*
The autoscaler of a workload: (root, role, pool, v: values, a: those of autoscaling, signals: list of (name, type of target, target), labels: of the signals). The
signals are series of the rules, or what the gateway's scaler answers.
*/}}
{{- define "rootward.scaling" -}}
{{- $ := .root }}
{{- $part := . }}
{{- $a := .a }}
{{- $signals := .signals }}
{{- $labels := merge (dict "namespace" $.Release.Namespace "release" $.Release.Name) .labels }}
{{- $selector := list }}
{{- range $key := list "namespace" "release" "pool" "model" }}{{ if hasKey $labels $key }}{{ $selector = append $selector (printf "%s=%q" $key (get $labels $key)) }}{{ end }}{{ end }}
{{- if eq $a.mode "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "rootward.metadata" $part | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: {{ include "rootward.controllerVersion" .v }}, kind: {{ include "rootward.controller" .v }}, name: {{ include "rootward.part" $part }}}
  minReplicas: {{ $a.minReplicas }}
  maxReplicas: {{ $a.maxReplicas }}
  behavior:
    {{- toYaml $a.behavior | nindent 4 }}
  metrics:
    # Quantities in milli-units: an HPA counts so, and floats would round up differently.
    {{- range $signal := $signals }}
    - type: External
      external:
        metric:
          name: rootward_{{ index $signal 0 }}
          selector:
            matchLabels: {{ toJson $labels }}
        target: {type: {{ index $signal 1 }}, {{ index $signal 1 | untitle }}: {{ printf "%.0fm" (mulf (float64 (index $signal 2)) 1000.0) | quote }}}
    {{- end }}
{{- else if hasPrefix "keda" $a.mode }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "rootward.metadata" $part | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: {{ include "rootward.controllerVersion" .v }}, kind: {{ include "rootward.controller" .v }}, name: {{ include "rootward.part" $part }}}
  minReplicaCount: {{ $a.minReplicas }}
  maxReplicaCount: {{ $a.maxReplicas }}
  pollingInterval: {{ $a.pollingIntervalSeconds }}
  cooldownPeriod: {{ $a.cooldownSeconds }}
  fallback:
    failureThreshold: 3
    replicas: {{ max 1 (int $a.minReplicas) }}
    behavior: currentReplicasIfHigher
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml $a.behavior | nindent 8 }}
  triggers:
    {{- range $signal := $signals }}
    {{- $push := index $signal 0 | replace "drafter_" "" | replace "speculating_" "" | replace "_busy" "" }}
    {{- if eq $a.mode "keda" }}
    - type: prometheus
      metricType: {{ index $signal 1 }}
      metadata:
        serverAddress: {{ $.Values.monitoring.prometheus.serverAddress }}
        query: {{ printf "max(rootward:%s{%s})" (index $signal 0) (join ", " $selector) | quote }}
        threshold: {{ index $signal 2 | quote }}
        activationThreshold: {{ ternary "0" "1000" (eq $push "sessions") | quote }}
        ignoreNullValues: "false"
    {{- else }}
    - type: {{ ternary "external-push" "external" (eq $push "demand") }}
      metricType: {{ index $signal 1 }}
      metadata:
        scalerAddress: {{ include "rootward.name" $ }}-gateway-scaler.{{ $.Release.Namespace }}.svc:{{ $.Values.gateway.scaler.port }}
        pool: {{ $part.pool }}
        signal: {{ $push }}
        target: {{ index $signal 2 | quote }}
      {{- if ne $.Values.tls.mode "none" }}
      authenticationRef:
        name: {{ include "rootward.name" $ }}-scaler
      {{- end }}
    {{- end }}
    {{- end }}
{{- end }}
{{- end }}
