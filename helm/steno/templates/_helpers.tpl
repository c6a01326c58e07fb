{{- define "steno.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of one component. Arguments: list ROOT COMPONENT. Immutable in a cluster: add nothing. */}}
{{- define "steno.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 50 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "steno.labels" -}}
{{- $root := index . 0 -}}
{{ include "steno.selector" . }}
app.kubernetes.io/part-of: steno
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "steno.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "steno.keysSecret" -}}
{{ default (printf "%s-keys" (include "steno.fullname" .)) .Values.keys.existingSecret }}
{{- end -}}

{{- define "steno.redisSecret" -}}
{{ default (printf "%s-redis" (include "steno.fullname" .)) .Values.redis.bundled.existingSecret }}
{{- end -}}

{{/* Of the StatefulSet, whose pods have its name, a dash and up to ten characters in a label: 63 in all. */}}
{{- define "steno.redisName" -}}
{{- printf "%s-redis" (include "steno.fullname" . | trunc 46 | trimSuffix "-") -}}
{{- end -}}

{{/* Replicas that there can ever be: workers dial each by its name. A release that is paused, with none, is one of one replica. */}}
{{- define "steno.maxReplicas" -}}
{{- if .Values.autoscaling.enabled -}}
{{- .Values.autoscaling.maxReplicas | int -}}
{{- else -}}
{{- max 1 (.Values.proxy.replicas | int) -}}
{{- end -}}
{{- end -}}

{{/* Where one name answers for one replica. */}}
{{- define "steno.workersUrls" -}}
{{- $root := . -}}
{{- $full := include "steno.fullname" . -}}
{{- range $i := until (include "steno.maxReplicas" . | int) -}}
{{- if $i }},{{ end -}}
http://{{ $full }}-{{ $i }}.{{ $full }}-replicas.{{ $root.Release.Namespace }}.svc:8081
{{- end -}}
{{- end -}}

{{/* Settings as environment variables. Arguments: list PREFIX SETTINGS. Numbers go through JSON: a template would print 3.2e+07. */}}
{{- define "steno.env" -}}
{{- $prefix := index . 0 -}}
{{- range $name, $value := index . 1 }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ printf "%s%s" $prefix (upper $name) }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A secret value that the cluster has already, else a new one; base64. Arguments: list DATA KEY PREFIX LENGTH. */}}
{{- define "steno.kept" -}}
{{- $data := index . 0 -}}
{{- if hasKey $data (index . 1) -}}
{{- index $data (index . 1) -}}
{{- else -}}
{{- printf "%s%s" (index . 2) (randAlphaNum (int (index . 3))) | b64enc -}}
{{- end -}}
{{- end -}}

{{/* The key of the Secret that opens /metrics. A Secret of one's own may be older than the metrics key. */}}
{{- define "steno.metricsKey" -}}
{{- default (ternary "admin-key" "metrics-key" (ne .Values.keys.existingSecret "")) .Values.keys.metricsKey -}}
{{- end -}}

{{/* The key of the Secret that opens what is on record, for reading; "": there is none. */}}
{{- define "steno.viewerKey" -}}
{{- default (ternary "" "viewer-key" (ne .Values.keys.existingSecret "")) .Values.keys.viewerKey -}}
{{- end -}}

{{/* How agents reach the proxy. */}}
{{- define "steno.publicUrl" -}}
{{- if .Values.proxy.settings.public_url -}}
{{- .Values.proxy.settings.public_url -}}
{{- else if and .Values.ingress.enabled .Values.ingress.host -}}
{{- printf "%s://%s%s" (ternary "https" "http" (ne .Values.ingress.tlsSecret "")) .Values.ingress.host (.Values.ingress.path | trimSuffix "/") -}}
{{- else -}}
{{- printf "http://%s.%s.svc:%d" (include "steno.fullname" .) .Release.Namespace (int .Values.service.port) -}}
{{- end -}}
{{- end -}}

{{- define "steno.controlUrl" -}}
{{- printf "http://%s-control.%s.svc:%d" (include "steno.fullname" .) .Release.Namespace (int .Values.control.port) -}}
{{- end -}}

{{- define "steno.sandboxesNamespace" -}}
{{- default (ternary .Values.rollout.namespace .Release.Namespace .Values.rollout.enabled) .Values.networkPolicy.sandboxes.namespace -}}
{{- end -}}

{{- /* The claim that archived sessions are on: "" where they go elsewhere, or nowhere. */ -}}
{{- define "steno.archiveClaim" -}}
{{- $archive := .Values.proxy.archive -}}
{{- $shared := or (has "ReadWriteMany" $archive.accessModes) (eq (include "steno.maxReplicas" .) "1") -}}
{{- if and (ne .Values.redis.mode "memory") (kindIs "invalid" .Values.proxy.settings.archive) -}}
{{- if $archive.existingClaim -}}{{ $archive.existingClaim }}{{- else if $shared -}}{{ include "steno.fullname" . }}-archive{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" where the chart itself chooses `off`: nobody has named an archive, and replicas can't share the claim. */}}
{{- define "steno.noArchive" -}}
{{- if and (ne .Values.redis.mode "memory") (kindIs "invalid" .Values.proxy.settings.archive) (not (include "steno.archiveClaim" .)) -}}
true
{{- end -}}
{{- end -}}

{{/*
Access modes of a claim that is there already: Kubernetes does not change them. Fails where the values ask for others, or where the claim
can't be shared by those that need it. Arguments: list ROOT VALUE NAME MODES MANY WITHOUT; MANY says who needs it, "" one pod alone;
WITHOUT, what to do instead. Nothing is found where helm does not ask the cluster.
*/}}
{{- define "steno.checkClaim" -}}
{{- $root := index . 0 -}}
{{- $value := index . 1 -}}
{{- $name := index . 2 -}}
{{- $modes := index . 3 | sortAlpha | join ", " -}}
{{- $found := dig "spec" "accessModes" list (lookup "v1" "PersistentVolumeClaim" $root.Release.Namespace $name) | sortAlpha | join ", " -}}
{{- $copy := printf "stop the pods that use it, copy all of its files to a new claim with ReadWriteMany, and name that one in %s.existingClaim (docs/deployment.md, Claims that are there already)" $value -}}
{{- if and $found (ne $found $modes) -}}
{{- fail (printf "%s.accessModes is [%s], and the claim %s, which is there already, has [%s]: Kubernetes does not change them. Set the value to [%s]; or, for several pods, %s" $value $modes $name $found $found $copy) -}}
{{- else if and $found (index . 4) (not (has "ReadWriteMany" (index . 3))) -}}
{{- fail (printf "%s, and the claim %s, which is there already, has [%s], which they can't share: %s%s" (index . 4) $name $found $copy (index . 5)) -}}
{{- end -}}
{{- end -}}

{{/* Bytes of an amount as Redis (2gb) or Kubernetes (4Gi) writes it. */}}
{{- define "steno.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "kb" 1024 "ki" 1024 "m" 1e6 "mb" 1048576 "mi" 1048576 "g" 1e9 "gb" 1073741824 "gi" 1073741824 "t" 1e12 "ti" 1099511627776 -}}
{{- $amount := . | toJson | trimAll "\"" -}}
{{- mulf (regexFind "^[0-9.]+(e[+]?[0-9]+)?" $amount | float64) (get $units (regexFind "[a-z]*$" (lower $amount)) | float64) | int64 -}}
{{- end -}}

{{/* The bundled Redis: its memory, and its volume, which Kubernetes does not change. */}}
{{- define "steno.checkRedis" -}}
{{- $redis := .Values.redis.bundled -}}
{{- $most := include "steno.bytes" $redis.maxMemory | int64 -}}
{{- with dig "limits" "memory" "" $redis.resources -}}
{{- if or (eq $most 0) (ge $most (include "steno.bytes" . | int64)) -}}
{{- fail (printf "redis.bundled.maxMemory is %s, and its container's resources.limits.memory %s: the node would end Redis where it should refuse what is too much. Set maxMemory below the limit, about half of it" $redis.maxMemory (toJson . | trimAll "\"")) -}}
{{- end -}}
{{- end -}}
{{- $there := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "steno.redisName" .) -}}
{{- range dig "spec" "volumeClaimTemplates" list $there -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" . -}}
{{- $class := dig "spec" "storageClassName" "" . -}}
{{- if or (ne (include "steno.bytes" $size) (include "steno.bytes" $redis.storage)) (ne $class $redis.storageClass) -}}
{{- fail (printf "redis.bundled.storage and storageClass are %s and %q, and the StatefulSet %s, which is there already, has %s and %q: Kubernetes does not change them. Set them to these values (docs/deployment.md, Claims that are there already, says how its volume grows)" $redis.storage $redis.storageClass (include "steno.redisName" $) $size $class) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Values that are each right and don't go together. */}}
{{- define "steno.check" -}}
{{- if eq .Values.redis.mode "memory" -}}
{{- if gt (include "steno.maxReplicas" . | int) 1 -}}
{{- fail "redis.mode is memory, and replicas share nothing then: set redis.mode, or proxy.replicas to 1 and autoscaling.enabled to false" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- include "steno.checkRedis" . -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "external") (not .Values.redis.external.secretName) -}}
{{- fail "redis.mode is external: redis.external.secretName must name the Secret that holds the URL" -}}
{{- end -}}
{{- with .Values.proxy.settings.archive -}}
{{- if or (regexMatch "^(file|local|memory)://" .) (not (or (eq . "off") (contains "://" .))) -}}
{{- fail (printf "proxy.settings.archive is %s, which ends with the proxy's pod: give the URL of an object store or off, or leave it out, and sessions go to the volume of proxy.archive" .) -}}
{{- end -}}
{{- end -}}
{{- if or (include "steno.noArchive" .) (and (include "steno.archiveClaim" .) (not .Values.proxy.archive.existingClaim)) -}}
{{- $many := eq (include "steno.noArchive" .) "true" | ternary (printf "the proxy may have %s replicas" (include "steno.maxReplicas" .)) "" -}}
{{- $without := "; sessions that are archived on it would answer 503. proxy.settings.archive: \"off\" goes on without them" -}}
{{- include "steno.checkClaim" (list . "proxy.archive" (printf "%s-archive" (include "steno.fullname" .)) .Values.proxy.archive.accessModes $many $without) -}}
{{- end -}}
{{- if and (include "steno.noArchive" .) .Values.proxy.settings.retention_s -}}
{{- fail "proxy.settings.retention_s is set, and replicas have no archive that they share: ended sessions would be deleted after it. Set proxy.archive.accessModes to [ReadWriteMany], or proxy.archive.existingClaim, or proxy.settings.archive to the URL of an object store (off: they are to be deleted)" -}}
{{- end -}}
{{- if and .Values.proxy.otelHeaders.secretName (not .Values.proxy.settings.otel_endpoint) -}}
{{- fail "proxy.otelHeaders.secretName is set: proxy.settings.otel_endpoint must say where traces go" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and .Values.worker.enabled (not .Values.worker.image) -}}
{{- fail "worker.enabled: worker.image must name an image with vLLM and steno" -}}
{{- end -}}
{{- with .Values.worker.stagingVolume -}}
{{- if and $.Values.worker.enabled (gt (int $.Values.worker.replicas) 1) (not (or (hasKey . "emptyDir") (hasKey . "ephemeral"))) -}}
{{- fail (printf "worker.stagingVolume is %s, and worker.replicas is above 1: workers that share it would remove what the others have staged there. Leave it out, or give an emptyDir or an ephemeral volume, which is each pod's own" (keys . | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- if .Values.trainer.enabled -}}
{{- if not .Values.trainer.image -}}
{{- fail "trainer.enabled: trainer.image must name an image with DeepSpeed and steno" -}}
{{- end -}}
{{- if not .Values.trainer.settings.model -}}
{{- fail "trainer.enabled: trainer.settings.model must name the model that training starts from" -}}
{{- end -}}
{{- $checkpoints := .Values.trainer.checkpoints -}}
{{- if not $checkpoints.existingClaim -}}
{{- $many := gt (int .Values.trainer.nodes) 1 | ternary (printf "trainer.nodes is %d" (int .Values.trainer.nodes)) "" -}}
{{- include "steno.checkClaim" (list . "trainer.checkpoints" (printf "%s-trainer" (include "steno.fullname" .)) $checkpoints.accessModes $many "") -}}
{{- end -}}
{{- if and (gt (int .Values.trainer.nodes) 1) (not $checkpoints.existingClaim) (not (has "ReadWriteMany" $checkpoints.accessModes)) -}}
{{- fail "trainer.nodes is above 1, and all nodes write checkpoints: set trainer.checkpoints.accessModes to [ReadWriteMany], or existingClaim" -}}
{{- end -}}
{{- end -}}
{{- if .Values.rollout.enabled -}}
{{- range $name := list "image" "namespace" "keySecret" -}}
{{- if not (get $.Values.rollout $name) -}}
{{- fail (printf "rollout.enabled: rollout.%s is missing" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "harbor" "agent" "run" -}}
{{- if not (get $.Values.rollout.settings $name) -}}
{{- fail (printf "rollout.enabled: rollout.settings.%s is missing" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.rollout.namespace .Release.Namespace -}}
{{- fail "rollout.namespace is the release's: rollouts may start commands in any pod there, and have its keys. Give one for the pods of trials alone" -}}
{{- end -}}
{{- range $name := list "namespace" "kubeconfig" "context" "queue" "template" -}}
{{- if hasKey $.Values.rollout.environmentOptions $name -}}
{{- fail (printf "rollout.environmentOptions has %s, which the chart itself sets (rollout.%s)" $name $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.sandboxes.enabled (ne (include "steno.sandboxesNamespace" .) .Values.rollout.namespace) -}}
{{- fail (printf "networkPolicy.sandboxes.namespace is %s, and the pods of trials are in rollout.namespace, %s" .Values.networkPolicy.sandboxes.namespace .Values.rollout.namespace) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.sandboxes.enabled .Values.ingress.enabled .Values.ingress.host (not .Values.proxy.settings.public_url) (not .Values.networkPolicy.sandboxes.ingress.peers) -}}
{{- fail (printf "networkPolicy.sandboxes.ingress.peers is missing: agents are pointed at the Ingress (%s), which sandboxes can't reach then. Say where it is, or give proxy.settings.public_url" .Values.ingress.host) -}}
{{- end -}}
{{- if and .Values.networkPolicy.sandboxes.enabled (not .Values.networkPolicy.sandboxes.podSelector) (eq (include "steno.sandboxesNamespace" .) .Release.Namespace) -}}
{{- fail "networkPolicy.sandboxes would cut off the proxy itself: give its namespace, or a podSelector" -}}
{{- end -}}
{{- $own := include "steno.labels" (list . "") | fromYaml -}}
{{- range $name, $values := dict "proxy" .Values.proxy "redis.bundled" .Values.redis.bundled "worker" .Values.worker "trainer" .Values.trainer "rollout" .Values.rollout -}}
{{- range $label, $_ := $values.podLabels -}}
{{- if hasKey $own $label -}}
{{- fail (printf "%s.podLabels has %s, which the chart itself sets: its Services and policies select pods by such labels" $name $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
