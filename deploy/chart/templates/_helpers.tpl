{{- /* Labels of every object of the release. */ -}}
{{- define "causeway.labels" -}}
app.kubernetes.io/name: causeway
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: causeway
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "causeway.image" -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}
{{- end }}

{{- /*
The objects of the release, as JSON: the output of kustomize for ../overlays (../render writes it into manifests), with the values
merged into it. With only the values way and address the objects are the same.
*/ -}}
{{- define "causeway.objects" -}}
{{- $found := dict }}
{{- $objects := list }}
{{- $namespaces := dict "causeway" .Release.Namespace "causeway-edge" .Values.edge.namespace }}
{{- $texts := splitList "\n---\n" (.Files.Get (printf "manifests/%s.yaml" .Values.way)) }}
{{- if dig "kubernetes" "heartbeats" "enabled" false .Values.gateway.config }}
{{- $texts = concat $texts (splitList "\n---\n" (.Files.Get "manifests/heartbeats-rbac.yaml")) }}
{{- end }}
{{- if kindIs "map" (dig "kubernetes" "pods" false .Values.gateway.config) }}
{{- $texts = concat $texts (splitList "\n---\n" (.Files.Get "manifests/pods-rbac.yaml")) }}
{{- end }}
{{- range $text := $texts }}
{{- $object := fromYaml $text }}
{{- $of := $object.metadata.namespace | default "" }}
{{- $ours := and (ne $object.kind "Namespace") (or (ne $of "causeway-edge") $.Values.edge.enabled) }}
{{- if $ours }}
{{- if $of }}{{ $_ := set $object.metadata "namespace" (get $namespaces $of | default $of) }}{{ end }}
{{- range $subject := $object.subjects }}
{{- if $subject.namespace }}{{ $_ := set $subject "namespace" (get $namespaces $subject.namespace) }}{{ end }}
{{- end }}
{{- $side := ternary "edge" "gateway" (eq $of "causeway-edge") }}
{{- $args := dict "object" $object "side" $side "values" (get $.Values $side) "root" $ }}
{{- if and (eq $object.kind "ConfigMap") (hasKey ($object.data | default dict) (printf "%s.yaml" $side)) }}
{{- include "causeway.config" $args }}
{{- else if has $object.kind (list "Deployment" "DaemonSet") }}
{{- include "causeway.workload" $args }}
{{- else if eq (printf "%s/%s" $object.kind $object.metadata.name) "Service/causeway-tunnels" }}
{{- $_ := set $found "service" true }}
{{- include "causeway.service" $args }}
{{- else if eq (printf "%s/%s" $object.kind $object.metadata.name) "Role/causeway-gateway-state" }}
{{- $_ := set (last $object.rules) "resourceNames" (list $.Values.gateway.caSecret) }}
{{- else if and (eq $object.kind "NetworkPolicy") $.Values.gateway.metrics.enabled }}
{{- $metrics := dict "ports" (list (dict "port" $.Values.gateway.metrics.port)) "from" (list (dict "namespaceSelector" dict)) }}
{{- $_ := set $object.spec "ingress" (append $object.spec.ingress $metrics) }}
{{- end }}
{{- if eq $object.kind "Secret" }}
{{- /* The state of the gateways outlives the release. */ -}}
{{- $_ := set $object.metadata "annotations" (dict "helm.sh/resource-policy" "keep") }}
{{- end }}
{{- $_ := set $object.metadata "labels" (mergeOverwrite ($object.metadata.labels | default dict) (include "causeway.labels" $ | fromYaml)) }}
{{- range $index, $patch := $.Values.patches }}
{{- if and (eq $patch.kind $object.kind) (eq $patch.name $object.metadata.name) }}
{{- $_ := mergeOverwrite $object (deepCopy $patch.patch) }}
{{- $_ := set $found (toString $index) true }}
{{- end }}
{{- end }}
{{- $objects = append $objects $object }}
{{- end }}
{{- end }}
{{- range $index, $patch := .Values.patches }}
{{- if not (hasKey $found (toString $index)) }}
{{- fail (printf "patches[%d]: way %s has no %s of the name %s" $index $.Values.way $patch.kind $patch.name) }}
{{- end }}
{{- end }}
{{- $service := .Values.gateway.service }}
{{- if and (or $service.type $service.annotations $service.nodePort) (not $found.service) }}
{{- fail (printf "gateway.service: way %s has no Service, because its gateways use the network of their hosts; remove it" .Values.way) }}
{{- end }}
{{- dict "items" $objects | toJson }}
{{- end }}

{{- /* Merges the values into the ConfigMap of a side. */ -}}
{{- define "causeway.config" -}}
{{- $file := printf "%s.yaml" .side }}
{{- $data := .object.data }}
{{- $given := deepCopy .values.config }}
{{- $address := .root.Values.address }}
{{- $said := ternary (dig "tunnel" "advertise" list $given) (dig "gateways" list $given) (eq .side "gateway") }}
{{- $key := ternary "gateway.config.tunnel.advertise" "edge.config.gateways" (eq .side "gateway") }}
{{- if not $said }}
{{- $address = required (printf "address is required: HOST:PORT at which edges reach the gateways' tunnel port, such as --set address=gateways.your.domain:10262 (or %s)" $key) $address }}
{{- $_ := set $data $file (replace "gw.example.com:10262" $address (get $data $file)) }}
{{- end }}
{{- if eq .side "gateway" }}
{{- include "causeway.state" (dict "given" $given "root" .root) }}
{{- if ne .values.caSecret "causeway-ca" }}
{{- $given = mergeOverwrite (dict "kubernetes" (dict "ca_secret" .values.caSecret)) $given }}
{{- end }}
{{- if .values.metrics.enabled }}
{{- $given = mergeOverwrite (dict "admin" (dict "metrics_listen" (printf "0.0.0.0:%v" .values.metrics.port))) $given }}
{{- end }}
{{- $text := get $data $file }}
{{- $text = replace "causeway/causeway-" (printf "%s/causeway-" .root.Release.Namespace) $text }}
{{- $text = replace "namespace: causeway\n" (printf "namespace: %s\n" .root.Release.Namespace) $text }}
{{- $text = replace "causeway-edge/causeway-edge" (printf "%s/causeway-edge" .root.Values.edge.namespace) $text }}
{{- $_ := set $data $file $text }}
{{- if .values.policy }}{{ $_ := set $data "policy.yaml" (printf "%s\n" (toYaml .values.policy)) }}{{ end }}
{{- end }}
{{- if $given }}{{ $_ := set $data $file (printf "%s\n" (mergeOverwrite (get $data $file | fromYaml) $given | toYaml)) }}{{ end }}
{{- end }}

{{- /* Refuses names of Secrets for which the release has no rights, and gateways without a common CA. */ -}}
{{- define "causeway.state" -}}
{{- $kubernetes := .given.kubernetes | default dict }}
{{- $own := printf "%s/causeway-state" .root.Release.Namespace }}
{{- if hasKey $kubernetes "ca_secret" }}
{{- fail "gateway.config.kubernetes.ca_secret: use gateway.caSecret, to which the gateways get their rights" }}
{{- end }}
{{- if hasKey $kubernetes "state" }}
{{- if and $kubernetes.state (ne $kubernetes.state $own) }}
{{- fail (printf "gateway.config.kubernetes.state: the gateways have rights only to the Secrets %s; remove it" $own) }}
{{- else if not (or $kubernetes.state .given.state (has .root.Values.way (list "addresses" "egress"))) }}
{{- fail "gateway.config.kubernetes.state: without these Secrets each gateway makes a CA of its own; set gateway.config.state" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Merges the values into the Deployment or DaemonSet of a side. */ -}}
{{- define "causeway.workload" -}}
{{- $values := .values }}
{{- $spec := .object.spec }}
{{- $pod := $spec.template.spec }}
{{- $image := deepCopy .root.Values.image }}
{{- $_ := set $image "tag" ($image.tag | default .root.Chart.AppVersion) }}
{{- $labels := dict "app.kubernetes.io/instance" .root.Release.Name }}
{{- $_ := mergeOverwrite $spec.template.metadata.labels $labels }}
{{- range $container := $pod.containers }}
{{- $_ := set $container "image" (include "causeway.image" $image) }}
{{- $_ := set $container "imagePullPolicy" $image.pullPolicy }}
{{- end }}
{{- range $name := $image.pullSecrets }}
{{- $_ := set $pod "imagePullSecrets" (append ($pod.imagePullSecrets | default list) (dict "name" $name)) }}
{{- end }}
{{- $container := first $pod.containers }}
{{- $_ := set $container "args" (concat $container.args $values.extraArgs) }}
{{- $_ := mergeOverwrite $container.resources (deepCopy $values.resources) }}
{{- range $name := $values.secrets }}
{{- $mount := dict "name" $name "mountPath" (printf "/etc/causeway-secrets/%s" $name) "readOnly" true }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) }}
{{- $volume := dict "name" $name "secret" (dict "secretName" $name "defaultMode" 0440) }}
{{- $_ := set $pod "volumes" (append $pod.volumes $volume) }}
{{- end }}
{{- if $values.tolerations }}{{ $_ := set $pod "tolerations" $values.tolerations }}{{ end }}
{{- if $values.affinity }}{{ $_ := set $pod "affinity" $values.affinity }}{{ end }}
{{- if eq .side "edge" }}
{{- if $values.nodeSelector }}{{ $_ := set $pod "nodeSelector" $values.nodeSelector }}{{ end }}
{{- else }}
{{- if $values.nodeSelector }}{{ $_ := set $pod "nodeSelector" (mergeOverwrite ($pod.nodeSelector | default dict) (deepCopy $values.nodeSelector)) }}{{ end }}
{{- if ne $values.replicas nil }}{{ $_ := set $spec "replicas" $values.replicas }}{{ end }}
{{- if and $values.metrics.enabled (not $pod.hostNetwork) }}
{{- $_ := set $container "ports" (append $container.ports (dict "name" "metrics" "containerPort" $values.metrics.port)) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Merges the values into the Service to which edges dial. */ -}}
{{- define "causeway.service" -}}
{{- $service := .values.service }}
{{- if $service.annotations }}{{ $_ := set .object.metadata "annotations" $service.annotations }}{{ end }}
{{- if $service.type }}{{ $_ := set .object.spec "type" $service.type }}{{ end }}
{{- if eq .object.spec.type "ClusterIP" }}{{ $_ := unset .object.spec "externalTrafficPolicy" }}{{ end }}
{{- if $service.nodePort }}{{ $_ := set (first .object.spec.ports) "nodePort" $service.nodePort }}{{ end }}
{{- end }}
