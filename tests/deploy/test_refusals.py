"""Wrong values are refused, and the message names the key. The engines word it differently; the key path is what counts."""

import pytest

BY_SCHEMA = {
    "an unknown key": ("gateway: {replica: 2}", "gateway", "replica"),
    "an unknown setting": ("verifier: {settings: {num_draft_token: 8}}", "settings", "num_draft_token"),
    "a setting that the chart computes": ("gateway: {settings: {listen: x}}", "settings", "listen"),
    "a wrong type": ("verifier: {replicas: two}", "verifier", "replicas"),
    "a value that the service would refuse": (
        "drafter: {pools: {default: {settings: {acceptance: 1.5}}}}",
        "acceptance",
    ),
    "an unknown mode": ("discovery: {mode: consul}", "discovery", "mode"),
    "maxReplicas 0": ("drafter: {pools: {default: {autoscaling: {maxReplicas: 0}}}}", "maxReplicas"),
    "an HPA that scales to zero": (
        "drafter: {pools: {default: {autoscaling: {mode: hpa, minReplicas: 0}}}}",
        "minReplicas",
    ),
    "a model without a name": ("models: [{}]", "models", "name"),
    "an unknown key of a model": ("models: [{name: a, verifier: {replica: 2}}]", "models", "replica"),
    "a digest that is none": ("image: {slim: {digest: latest}}", "image", "digest"),
    "a pool name that no object could have": ("drafter: {pools: {L4_pool: {}}}", "drafter", "L4_pool"),
    "a verifier that has no port": ("discovery: {verifiers: ['redis:x']}", "verifiers"),
    "a drafter without its pool": ("discovery: {drafters: ['host:7002']}", "drafters"),
    "a size that Redis does not know": ("redis: {maxmemory: 10tb}", "redis", "maxmemory"),
    "a password in values": (
        "redis: {mode: external, external: {url: 'redis://user:pw@host:6379/0'}}",
        "external",
        "url",
    ),
}
BY_TEMPLATE = {
    "bounds the wrong way round": (
        "drafter: {pools: {default: {autoscaling: {mode: keda, minReplicas: 9, maxReplicas: 3}}}}",
        "drafter.pools.default.autoscaling.minReplicas",
    ),
    "a guard below the target": (
        "drafter: {pools: {default: {autoscaling: {guardUtilization: 0.6}}}}",
        "drafter.pools.default.autoscaling.guardUtilization",
    ),
    "zero by inheritance, under an HPA": (
        "drafter: {defaults: {autoscaling: {minReplicas: 0}}, pools: {default: {autoscaling: {mode: hpa}}}}",
        "drafter.pools.default.autoscaling.minReplicas",
    ),
    "GPUs that machines cannot share": (
        "verifier: {nodes: 2, settings: {tensor_parallel: 3}}",
        "verifier.settings.tensor_parallel",
    ),
    "a draft head beside tensor parallel": (
        "verifier: {settings: {tensor_parallel: 2, draft_head: /models/head}}",
        "verifier.settings.draft_head",
    ),
    "a head that drafts beside tensor parallel": (
        "verifier: {settings: {tensor_parallel: 2, local_draft: 'head:/models/head'}}",
        "verifier.settings.local_draft",
    ),
    "two models of one name": ("models: [{name: a}, {name: a, servedModelName: b}]", "models.a"),
    "two models that clients call the same": (
        "models: [{name: a, servedModelName: b}, {name: b}]",
        "models.b",
        "servedModelName",
    ),
    "pools of two models that are named the same": (
        "models: [{name: a, drafter: {pools: {b-c: {}}}}, {name: a-b, drafter: {pools: {c: {}}}}]",
        "models.a-b.drafter.pools.c",
        "a-b-c",
    ),
    "gateways that would mount weights": (
        "verifier: {model: {source: pvc, claim: weights}}",
        "gateway.tokenizer.source",
    ),
    "gateways that would mount the weights of one of several models": (
        "models: [{name: a, verifier: {model: {source: image, image: x/y:1}}}]",
        "models.a.tokenizer.source",
    ),
    "push without a port": ("drafter: {pools: {default: {autoscaling: {mode: keda-push}}}}", "gateway.scaler.port"),
    "a drain that nobody waits for": ("verifier: {drain: {timeoutSeconds: 900}}", "verifier.drain"),
    "gateways' bounds": (
        "gateway: {autoscaling: {mode: hpa, minReplicas: 9, maxReplicas: 3}}",
        "gateway.autoscaling.minReplicas",
    ),
    "an HPA without a request to count in": (
        "gateway: {autoscaling: {mode: hpa}, resources: {requests: {cpu: null}}}",
        "gateway.resources.requests.cpu",
    ),
    "two ports of one number": ("gateway: {service: {grpcPort: 8000}}", "gateway.service.httpPort"),
    "a scaler on the port of clients": ("gateway: {scaler: {port: 50051}}", "gateway.scaler.port"),
    "a scaler on the port of probes": ("gateway: {scaler: {port: 9090}}", "gateway.scaler.port"),
    "names that no object could have": (
        "models: [{name: fifteen-letters, drafter: {pools: {eight-xx: {}}}}]",
        "models.fifteen-letters.drafter.pools.eight-xx",
    ),
    "workers of nobody's model": ("models: [{name: a}]\ndiscovery: {verifiers: ['v:1']}", "discovery.verifiers"),
    "bounds of a model's pool": (
        "models: [{name: a, drafter: {pools: {p: {autoscaling: {mode: keda, minReplicas: 9, maxReplicas: 3}}}}}]",
        "models.a.drafter.pools.p.autoscaling.minReplicas",
    ),
    "an external Redis nowhere": ("redis: {mode: external}", "redis.external.url"),
    "a test that would be turned away": ("gateway: {auth: {existingSecret: keys}}", "tests.apiKeySecret"),
    "nobody to find": ("discovery: {mode: static}", "discovery.verifiers"),
    "a claim without a name": ("drafter: {pools: {default: {model: {source: pvc}}}}", "model.claim"),
    "a certificate that is missing": ("tls: {mode: existingSecret}", "tls.existingSecrets."),
    "a route to no Gateway": ("gateway: {route: {enabled: true}}", "gateway.route.parentRefs"),
}


@pytest.mark.parametrize("case", [*BY_SCHEMA, *BY_TEMPLATE])
def test_is_refused_by_name(helm, case):
    values, *words = BY_SCHEMA.get(case) or BY_TEMPLATE[case]
    done = helm.template(values)
    assert done.returncode != 0, f"{case} was accepted"
    assert ("schema" in done.stderr) == (case in BY_SCHEMA), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
