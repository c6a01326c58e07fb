{{/* What pods with GPUs have in common. Arguments: list ROOT COMPONENT VALUES, of worker or trainer. */}}
{{- define "steno.podSpec" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with $values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "steno.placement" . }}
{{- end -}}

{{/* What all pods let their values choose: as whom, where and how urgently they run. Arguments: list ROOT COMPONENT VALUES. */}}
{{- define "steno.placement" -}}
{{- $selector := include "steno.selector" . | fromYaml -}}
{{- $values := index . 2 -}}
{{- with $values.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (merge (dict) . (ternary dict (dict "labelSelector" (dict "matchLabels" $selector)) (hasKey . "labelSelector"))) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The root is read-only: downloads, compiled kernels and temporary files go here. */}}
{{- define "steno.home" -}}
- {name: HOME, value: /var/lib/steno}
- {name: LOGNAME, value: steno}
- {name: TMPDIR, value: /var/lib/steno}
{{- end -}}

{{- define "steno.homeMounts" -}}
- {name: keys, mountPath: /run/secrets/steno, readOnly: true}
- {name: state, mountPath: /var/lib/steno}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* Arguments: list ROOT VALUES KEY, of which the pod gets the one key. */}}
{{- define "steno.homeVolumes" -}}
- name: keys
  secret:
    secretName: {{ include "steno.keysSecret" (index . 0) }}
    defaultMode: 0440
    items:
      - {key: {{ index . 2 }}, path: {{ index . 2 }}}
- {name: state, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index . 1).shmSize }}}
{{- end -}}

{{/* Who may connect: components of the release on all ports, Prometheus to the metrics. Arguments: list ROOT COMPONENTS. */}}
{{- define "steno.peers" -}}
{{- $root := index . 0 -}}
{{- range index . 1 }}
- from:
    - podSelector:
        matchLabels:
          {{- include "steno.selector" (list $root .) | nindent 10 }}
{{- end }}
{{- with $root.Values.networkPolicy.monitoring }}
- ports:
    - {protocol: TCP, port: metrics}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "steno.leastPrivilege" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
