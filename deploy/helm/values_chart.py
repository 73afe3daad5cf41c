"""Every value of the chart: what it means, its type, its default. One function for each part; `values` puts them together."""

from __future__ import annotations

from values_words import Schema, choice, flag, free, group, listed, settings_of, share, text, whole

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from verifier_service.settings import VerifierSettings


def image(meaning: str, name: str, tag: str = "") -> Schema:
    return group(
        meaning,
        repository=text("Image without tag.", name, minLength=1),
        tag=text("Tag, pinned by the digest after @." if tag else "Tag; empty is the chart's appVersion.", tag),
        digest=text("sha256:…; wins over the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=choice("When to pull.", "IfNotPresent", "Always", "Never"),
    )


def model(of: str, spec: str) -> Schema:
    return group(
        f"Weights of the {of} model.",
        source=choice(
            "`spec`: the image or the hub cache has it; `hf`, `url`: downloaded by an init container; `pvc`, `image` (OCI volume, "
            "Kubernetes 1.35+, before with the gate ImageVolume), `host`: mounted read-only.",
            *("spec", "hf", "url", "pvc", "image", "host"),
        ),
        spec=text("`spec`: what the service's `model` setting takes.", spec),
        repo=text("`hf`: repository."),
        revision=text("`hf`: commit or tag; pin it.", "main"),
        url=text("`url`: folder in an object store that fsspec reads: s3://, gs:// and others."),
        secret=text(
            "`hf`: Secret with key `token`, for gated models; `url`: Secret with variables, as AWS_ACCESS_KEY_ID."
        ),
        cache=group(
            "`hf`, `url`: where downloads are kept: the first pod downloads, the others wait. Neither: each pod downloads for itself.",
            claim=text("Claim that every pod mounts (ReadWriteMany)."),
            hostPath=text("Folder of each node that user 10001 may write."),
        ),
        claim=text("`pvc`: claim that holds the folder."),
        image=text("`image`: OCI image reference."),
        hostPath=text("`host`: folder on the node."),
        subPath=text("Folder below the mount or the download."),
        sizeLimit=text("`hf`, `url` without a cache: most disk for the download.", "200Gi"),
    )


def tokenizer() -> Schema:
    schema = model("target", "")
    schema["description"] = (
        "Where gateways read the tokenizer; empty source: where verifiers read weights (`hf` and `url` download tokenizer files alone). "
        "Required with `pvc`, `image` or `host` weights: name a small folder, or the folder of the weights if gateways may mount them."
    )
    schema["properties"]["source"].update(default="", enum=["", "spec", "hf", "url", "pvc", "image", "host"])
    return schema


def drain(pre_stop: int, timeout: int, margin: int) -> Schema:
    return group(
        "terminationGracePeriodSeconds = preStop + timeout + margin.",
        preStopSleepSeconds=whole("Time for peers to stop sending before SIGTERM.", pre_stop),
        timeoutSeconds=whole("The service's shutdown_timeout_s.", timeout),
        marginSeconds=whole("For what the service does once the timeout has passed.", margin, 1),
    )


def addresses(meaning: str, before: str) -> Schema:
    """Of workers outside the release. Each ends with a port, which NetworkPolicies open."""
    pattern = rf"^{before}((dns|static):)?([^\s:=/\[\]]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{{0,4}}$"
    return {**listed(meaning), "items": {"type": "string", "pattern": pattern}}


def lifetime(drain: Schema, pdb: Schema, startup_failures: int) -> dict[str, Schema]:
    """How pods of a part start, run somewhere, and go."""
    return {"drain": drain, "pdb": pdb, "probes": probes(startup_failures), **fit()}


def on_gpus() -> dict[str, Schema]:
    return {
        "gpuToleration": flag("Tolerate nvidia.com/gpu:NoSchedule.", True),
        "shm": text("Size of /dev/shm; empty is the runtime's."),
    }


def pdb(most: int | str) -> Schema:
    percent = {"type": ["integer", "string"], "description": "Evicted at one time.", "default": most}
    return group(
        "PodDisruptionBudget; rendered only where there can be more than one replica.",
        enabled=flag("Render it.", True),
        maxUnavailable=percent,
    )


def probes(failures: int) -> Schema:
    return group(
        "HTTP probes on the admin port.",
        startupFailureThreshold=whole("× 10 s: longer than the slowest start, model load included.", failures, 1),
        livenessFailureThreshold=whole("× 10 s until a hung process is restarted.", 6, 1),
    )


def placement() -> dict[str, Schema]:
    """Where pods run, and as whom."""
    return {
        "nodeSelector": free("Labels of nodes."),
        "tolerations": listed("Taints that are tolerated."),
        "affinity": free("Affinity, as in a pod."),
        "priorityClassName": text("Priority class."),
        "schedulerName": text("Scheduler, if not the cluster's."),
        "podAnnotations": free("Annotations of pods."),
        "podLabels": free("More labels of pods."),
        "podSecurityContext": free("What differs from `global.podSecurityContext`, as {supplementalGroups: [44]}."),
        "securityContext": free(
            "What differs from `global.containerSecurityContext`, as {capabilities: {add: [IPC_LOCK]}}."
        ),
    }


def fit() -> dict[str, Schema]:
    """What a platform adds to pods of a service."""
    return {
        **placement(),
        "runtimeClassName": text("Runtime class, as `nvidia`."),
        "resourceClaims": listed("Dynamic resource claims of the pod (Kubernetes 1.34+)."),
        "image": free(
            "What differs from the part's image, as {repository, tag, digest}: a build for another accelerator."
        ),
        "extraVolumes": listed("More volumes of pods."),
        "extraVolumeMounts": listed("More mounts of the service's container."),
        "sidecars": listed("More containers of pods; Pod Security restricted holds for them, too."),
        "extraEnv": listed("More variables of the service, as in a container."),
        "serviceAccountAnnotations": free("Annotations of the ServiceAccount."),
    }


def cpu(request: str, memory: str) -> Schema:
    requests = {"cpu": request, "memory": memory, "ephemeral-storage": "64Mi"}
    return free("As in a container.", {"requests": requests, "limits": {"memory": memory, "ephemeral-storage": "4Gi"}})


def scaling_of_drafters() -> Schema:
    schema = group(
        "How many drafters; see docs/operations/autoscaling.md.",
        mode=choice("`keda-push` needs `gateway.scaler.port`.", "none", "hpa", "keda", "keda-push"),
        minReplicas=whole("`hpa` needs at least 1.", 1),
        maxReplicas=whole("From the verifiers' capacity.", 8, 1),
        targetUtilization=share("u: share of rows that demand may fill.", 0.7),
        guardUtilization=share("Share of rows busy that adds drafters whatever the demand says.", 0.85),
        stallTarget=share("Share of rounds spent queueing at drafters that adds drafters.", 0.10),
        behavior=free(
            "As in an HPA v2.",
            {
                "scaleUp": {
                    "stabilizationWindowSeconds": 0,
                    "selectPolicy": "Max",
                    "policies": [
                        {"type": "Percent", "value": 100, "periodSeconds": 15},
                        {"type": "Pods", "value": 4, "periodSeconds": 15},
                    ],
                },
                "scaleDown": {
                    "stabilizationWindowSeconds": 180,
                    "selectPolicy": "Min",
                    "policies": [
                        {"type": "Pods", "value": 2, "periodSeconds": 60},
                        {"type": "Percent", "value": 20, "periodSeconds": 60},
                    ],
                },
            },
        ),
        pollingIntervalSeconds=whole("KEDA: between two questions while there are no drafters.", 15, 1),
        cooldownSeconds=whole("KEDA: idle time before the last drafter goes.", 300),
    )
    no_zero = {"if": {"properties": {"mode": {"const": "hpa"}}, "required": ["mode"]}}
    no_zero["then"] = {"properties": {"minReplicas": {"minimum": 1}}}
    return {**schema, **no_zero}


def pool() -> Schema:
    return group(
        "One pool of drafters.",
        replicas=whole("Drafters, while no autoscaler decides.", 1),
        model=model("draft", "/opt/rootward/demo/draft"),
        rows=whole(
            "Rows of one draft forward (`max_num_batched_tokens`): what one replica counts for in scaling.", 64, 1
        ),
        resources=cpu("1", "2Gi"),
        settings=settings_of(DrafterSettings),
        spot=flag("Tolerate the usual taints of preemptible nodes.", False),
        trusted=flag(
            "Its drafters sample from the distributions that they declare, which verifiers audit; false: they are verified by match only.",
            True,
        ),
        **on_gpus(),
        autoscaling=scaling_of_drafters(),
        **lifetime(drain(0, 20, 5), pdb("25%"), startup_failures=60),
    )


def redis() -> Schema:
    return group(
        "Leases, sessions, the registry of workers. Losing it stops no running request.",
        mode=choice("`single`: one of ours; `external`: yours.", "single", "external"),
        keyPrefix=text(
            "First part of all keys; empty: `rw` in `single`, `rw-NAMESPACE-RELEASE` in `external`. Releases of one prefix on one "
            "Redis find each other's workers.",
            pattern="^[A-Za-z0-9._-]{0,64}$",
        ),
        image=image(
            "Image of our own; `global.imageRegistry` stands before a repository that names no registry.",
            "docker.io/library/redis",
            "7.4.10-alpine@sha256:e7723ff73d963f5cc6d9c4643ea3d989527a402a319239054e9472a7fb9219a2",
        ),
        auth=group(
            "Users gateway, verifier and drafter, each with rights on its own keys.",
            existingSecret=text(
                "`single`: Secret with keys gateway, verifier, drafter, users.acl; empty: generated once."
            ),
        ),
        resources=cpu("100m", "256Mi"),
        **placement(),
        maxmemory=text(
            "`single`: Redis refuses writes beyond it; keep it below the memory limit, or the kernel ends Redis first.",
            "192mb",
            pattern="^[0-9]+([kKmMgG]?[bB]?)$",
        ),
        external=group(
            "`external`: where it is.",
            url=text(
                "redis://host:6379/0, redis+sentinel://host:26379/NAME/0, redis+cluster://…; rediss for TLS; without a password.",
                pattern="^((redis|rediss)(\\+[a-z]+)?://[^@]*)?$",
            ),
            existingSecret=text("Secret with the whole URL, password included, under `urlKey`; wins over `url`."),
            urlKey=text("Key in that Secret.", "url"),
            perRole=flag(
                "The Secret has three URLs, under `gateway`, `verifier`, `drafter`: users of least rights (docs/operations/redis.md).",
                False,
            ),
            ports=listed("For the NetworkPolicy; Sentinels and servers, as [26379, 6379].", "integer", [6379]),
            caSecret=text(
                "Secret with `ca.crt` of the server, and `tls.crt`, `tls.key` if it asks for a certificate: files in /etc/rootward/redis, "
                "named by the URL as ?ssl_ca_certs=/etc/rootward/redis/ca.crt."
            ),
        ),
    )


def tls() -> Schema:
    return group(
        "Mutual TLS between gateway, verifiers and drafters.",
        mode=choice(
            "`certManager`: certificates of an issuer; `existingSecret`: yours.",
            "none",
            "existingSecret",
            "certManager",
        ),
        issuerRef=free("`certManager`: {name, kind, group}."),
        trustDomain=text("Of the SPIFFE identities in certificates.", "cluster.local"),
        duration=text("`certManager`: lifetime of certificates.", "2160h"),
        public=group(
            "What clients of the gateway see, where its certificate is for the other roles alone: a public authority signs "
            "no names inside a cluster. Used if `secret` or `issuerRef` is given.",
            secret=text("kubernetes.io/tls Secret; with `issuerRef` the one that is written."),
            issuerRef=free("cert-manager's issuer, as {name, kind, group}, for instance one of ACME."),
            hostnames=listed("Names; empty: those of routes and Ingress.", "string"),
        ),
        existingSecrets=group(
            "`existingSecret`: kubernetes.io/tls Secrets with `ca.crt`, one per role.",
            gateway=text(
                "Of the gateway. Names: spiffe://DOMAIN/ns/NAMESPACE/sa/RELEASE-gateway, and where clients find it."
            ),
            verifier=text("Of verifiers. Names: spiffe://…-verifier, and RELEASE-verifier as DNS name."),
            drafter=text("Of drafters. Names: spiffe://…-drafter, and RELEASE-drafter as DNS name."),
            redis=text("Of the built-in Redis. Name: RELEASE-redis.NAMESPACE.svc."),
            keda=text(
                "With `gateway.scaler.port`: what KEDA shows to the scaler, a certificate of its own for clients."
            ),
        ),
    )


def gateway() -> Schema:
    return group(
        "The face to clients.",
        replicas=whole("Gateways, while no autoscaler decides.", 2),
        resources=cpu("500m", "1Gi"),
        settings=settings_of(GatewaySettings),
        tokenizer=tokenizer(),
        autoscaling=group(
            "By CPU: tokenising and detokenising is what costs here.",
            mode=choice("Who decides.", "none", "hpa"),
            minReplicas=whole("At least.", 2, 1),
            maxReplicas=whole("At most.", 8, 1),
            targetCPU=whole("Percent of the request.", 70, 1),
        ),
        service=group(
            "Where clients connect.",
            type=choice("Kind of Service.", "ClusterIP", "NodePort", "LoadBalancer"),
            grpcPort=whole("gRPC.", 50051, 1),
            httpPort=whole("OpenAI-compatible HTTP.", 8000, 1),
            annotations=free("Annotations."),
        ),
        route=group(
            "Gateway API: an HTTPRoute, and a GRPCRoute where gRPC has host names of its own.",
            enabled=flag("Render them.", False),
            parentRefs=listed("Gateways they attach to."),
            hostnames=listed("Host names of HTTP.", "string"),
            grpcHostnames=listed(
                "Host names of gRPC; none may be one of HTTP, since a Gateway accepts one kind of route a name.",
                "string",
            ),
            caCertificateRef=free(
                "With `tls`: the authority for the BackendTLSPolicy, as {group, kind, name}; every implementation takes a ConfigMap with "
                "`ca.crt`, many the Secret of the gateway, which is the default."
            ),
        ),
        ingress=group(
            "Ingress for HTTP.",
            enabled=flag("Render it.", False),
            className=text("Ingress class."),
            host=text("Host name."),
            tlsSecret=text("Secret with its certificate."),
            annotations=free("Annotations."),
        ),
        auth=group(
            "API keys, see `rootward keys`.",
            existingSecret=text("Secret with the file of keys under `keys.yaml`; empty: open to all."),
        ),
        scaler=group(
            "KEDA's external scaler.",
            port=whole("Port of the gRPC API; 0 is off.", 0),
        ),
        **lifetime(drain(5, 30, 10), pdb(1), startup_failures=30),
    )


def verifier() -> Schema:
    return group(
        "The target model.",
        replicas=whole("Verifiers.", 1, 1),
        nodes=whole(
            "Machines that share one model: above 1 a verifier is a group of a LeaderWorkerSet (install its controller, 0.9 or "
            "newer), and `settings.tensor_parallel` the GPUs of all its machines.",
            1,
            1,
        ),
        exclusiveTopology=text(
            "With several `nodes`: label of nodes, as a rack's or a node pool's, whose value all machines of a group share, "
            "and no other group."
        ),
        model=model("target", "/opt/rootward/demo/target"),
        rows=whole("Rows of one target forward (`max_num_batched_tokens`).", 256, 2),
        resources=cpu("1", "2Gi"),
        settings=settings_of(VerifierSettings),
        **on_gpus(),
        autoscaling=group(
            "How many verifiers, by sessions and KV memory: see docs/operations/autoscaling.md.",
            mode=choice("Who decides; `keda` asks Prometheus.", "none", "hpa", "keda"),
            minReplicas=whole("At least.", 1, 1),
            maxReplicas=whole("At most: GPUs there are.", 4, 1),
            targetSessions=share("Share of `max_num_seqs` that running and waiting sessions may fill.", 0.8),
            targetKV=share("Share of KV memory in use that adds verifiers whatever the sessions say.", 0.85),
            behavior=free(
                "As in an HPA v2. One verifier goes at a time: its sessions move, and their KV is computed again.",
                {
                    "scaleUp": {"stabilizationWindowSeconds": 30},
                    "scaleDown": {
                        "stabilizationWindowSeconds": 600,
                        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
                    },
                },
            ),
            pollingIntervalSeconds=whole("KEDA: between two questions.", 15, 1),
            cooldownSeconds=whole("KEDA: not used above zero replicas.", 300),
        ),
        **lifetime(drain(5, 60, 10), pdb(1), startup_failures=180),
    )


def network_policy() -> Schema:
    return group(
        "Default deny; exactly the calls that the parts make.",
        enabled=flag("Render them.", True),
        clients=listed("Peers (`from` entries) that may call the gateway; empty: everybody."),
        workerClients=listed(
            "More peers that may call verifiers and drafters, as gateways and verifiers of another release that has them in "
            "its `discovery.verifiers`, `discovery.drafters` (without `tls`, whose certificates name one release)."
        ),
        prometheusNamespaceSelector=free("Namespaces that may read the admin ports; empty: all."),
        kedaNamespaceSelector=free(
            "Namespaces that may ask the scaler.", {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}
        ),
        dnsPorts=listed("Ports of the cluster's DNS: the Service's and those of its pods.", "integer", [53, 5353]),
        apiServerPorts=listed(
            "Ports of the API server, for `discovery.mode: kubernetes`: the Service's and the one behind it.",
            "integer",
            [443, 6443],
        ),
        extraEgress=listed("More egress rules of every part."),
    )


def monitoring() -> Schema:
    def switch(meaning: str, **more: Schema) -> Schema:
        return group(meaning, enabled=flag("Render it.", False), labels=free("What your operator selects by."), **more)

    return group(
        "For the Prometheus operator and Grafana.",
        podMonitor=switch("PodMonitor: it also scrapes pods that drain.", interval=text("Between scrapes.", "15s")),
        rules=switch(
            "PrometheusRule with the tested recording and alert rules, for series of this namespace and `release` (the label "
            "that the PodMonitor adds)."
        ),
        dashboards=switch("ConfigMaps with dashboards."),
        prometheus=group(
            "Used by `keda`.",
            serverAddress=text("URL.", "http://prometheus-operated.monitoring.svc:9090"),
        ),
    )


def values() -> Schema:
    parts = group(
        "Values of the chart.",
        **{
            "global": group(
                "For everything.",
                imageRegistry=text(
                    "Registry that holds your build of the images (docs/operations/images.md); required unless `image.*.repository` "
                    "names a registry itself."
                ),
                imagePullSecrets=listed("As in a pod."),
                commonLabels=free("Labels of every object."),
                clusterDomain=text("DNS domain of the cluster, for the names in certificates.", "cluster.local"),
                ipv6=flag("Listen on [::], as clusters with IPv6 alone need; nodes without IPv6 cannot.", False),
                tmpSizeLimit=text("Most disk of a pod's /tmp.", "2Gi"),
                downloadEnv=listed(
                    "Variables of the container that downloads models (`source: hf`, `url`): HTTPS_PROXY, HF_ENDPOINT, "
                    "AWS_ENDPOINT_URL, as in a container. NetworkPolicies open the ports of URLs given here as values."
                ),
                podSecurityContext=free(
                    "Of all pods. Clusters that give out users (OpenShift): runAsUser, runAsGroup and fsGroup null.",
                    {
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                        "runAsGroup": 10001,
                        "fsGroup": 10001,
                        "fsGroupChangePolicy": "OnRootMismatch",
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                ),
                containerSecurityContext=free(
                    "Of all containers.",
                    {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                ),
                logLevel=choice("Least severity that is logged.", "info", "debug", "warning", "error"),
            )
        },
        image=group(
            "Images.",
            slim=image("Gateway, SDK, command line; `global.imageRegistry` stands before it.", "rootward/slim"),
            worker=image("Verifier and drafter; `global.imageRegistry` stands before it.", "rootward/worker"),
        ),
        discovery=group(
            "How gateways find verifiers and verifiers find drafters.",
            mode=choice(
                "`redis`: the registry; `kubernetes`: EndpointSlices (one Role); `dns`: headless Services; "
                "`static`: the lists below alone.",
                *("redis", "kubernetes", "dns", "static"),
            ),
            verifiers=addresses("More verifiers, as host:port, in any mode.", ""),
            drafters=addresses("More drafters, as pool=host:port, in any mode.", "[^=:]+="),
        ),
        models={
            "type": "array",
            "description": "Several models: a list of {name, servedModelName, verifier, drafter: {pools}, tokenizer}. Verifier, pools say "
            "what differs from `verifier` and `drafter.defaults`; `tokenizer` is as `gateway.tokenizer`. In place of "
            "`servedModelName` and `drafter.pools`.",
            "default": [],
            "items": {
                **group(
                    "One model.",
                    name={
                        **text("For names of objects, and what clients call it."),
                        "pattern": "^[a-z]([-a-z0-9]{0,13}[a-z0-9])?$",
                    },
                    servedModelName=text("What clients call it, if not the name."),
                    verifier={"$ref": "#/properties/verifier"},
                    drafter=group("Its drafters.", pools={"$ref": "#/properties/drafter/properties/pools"}),
                    tokenizer={"$ref": "#/properties/gateway/properties/tokenizer"},
                ),
                "required": ["name"],
            },
        },
        servedModelName=text("What clients call the model; empty: the last part of its path."),
        gateway=gateway(),
        verifier=verifier(),
        drafter=group(
            "Pools of drafters, by name. Each pool takes over `defaults` and overrides what differs.",
            defaults=pool(),
            pools={
                "type": "object",
                "description": "Name → what differs from `defaults`.",
                "default": {"default": {}},
                "propertyNames": {"pattern": "^[a-z]([-a-z0-9]{0,20}[a-z0-9])?$"},
                "additionalProperties": pool(),
            },
        ),
        redis=redis(),
        tls=tls(),
        networkPolicy=network_policy(),
        monitoring=monitoring(),
        rbac=group("Rights.", create=flag("Render Roles (only `discovery.mode: kubernetes` needs one).", True)),
        tests=group(
            "`helm test`.",
            enabled=flag("Render the test pod.", True),
            apiKeySecret=text("With `gateway.auth`: Secret with an API key, itself, under `key`."),
            **placement(),
        ),
        extraManifests=listed("More objects; strings are templates.", "string"),
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", **parts}
