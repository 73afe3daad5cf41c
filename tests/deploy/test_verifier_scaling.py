"""The HPA of verifiers as the chart renders it, run by a model of the controller on loads that come and go."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from support.helm import named

from benchmarks.hpa import Autoscaler, Policy, Rules, Spec, Target
from verifier_service.settings import VerifierSettings

SYNC_S = 15
PLACES = VerifierSettings.model_fields["max_num_seqs"].default


def spec_of(hpa) -> Spec:
    """The spec of a rendered HPA; what it leaves out has Kubernetes' defaults."""
    behavior = hpa["spec"]["behavior"]
    defaults = {"scaleUp": Spec((Target("Value", 1),)).up, "scaleDown": Spec((Target("Value", 1),)).down}

    def rules(direction: str) -> Rules:
        given, default = behavior[direction], defaults[direction]
        policies = tuple(Policy(p["type"], p["value"], p["periodSeconds"]) for p in given.get("policies", []))
        return Rules(given["stabilizationWindowSeconds"], policies or default.policies)

    targets = []
    for metric in hpa["spec"]["metrics"]:
        kind, quantity = metric["external"]["target"]["type"], list(metric["external"]["target"].values())[1]
        targets.append(Target(kind, int(quantity.removesuffix("m")) / 1000))
    spec = hpa["spec"]
    return Spec(tuple(targets), spec["minReplicas"], spec["maxReplicas"], rules("scaleUp"), rules("scaleDown"))


@pytest.fixture
def hpa(helm):
    return named(helm.objects("hpa"), "HorizontalPodAutoscaler", "rw-rootward-verifier")


def load(seed: int, most: int) -> list[int]:
    """Sessions at each sync: levels of some minutes, with everything between none and more than all verifiers hold."""
    random = Random(seed)
    levels = [(random.randrange(int(1.3 * most)), random.randrange(4, 200)) for _ in range(40)]
    return [sessions for sessions, syncs in levels for _ in range(syncs)]


def followed(spec: Spec, sessions: list[int]) -> list[int]:
    """Verifiers at each sync. The KV memory in use grows with the sessions of a verifier."""
    scaler, replicas, found = Autoscaler(spec), spec.least, []
    for step, held in enumerate(sessions):
        usage = min(1.0, 0.9 * held / (replicas * PLACES))
        replicas = scaler.sync(step * SYNC_S, replicas, replicas, (float(held), usage))
        found.append(replicas)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_verifier_goes_whose_sessions_have_no_place(hpa, seed):
    spec = spec_of(hpa)
    sessions = load(seed, spec.most * PLACES)
    replicas = followed(spec, sessions)
    shrunk = [
        (now, held) for (was, now), held in zip(itertools.pairwise(replicas), sessions[1:], strict=True) if now < was
    ]
    assert shrunk
    assert all(now * PLACES >= held for now, held in shrunk)


def test_a_load_that_stays_has_places_for_all(hpa):
    spec = spec_of(hpa)
    for held in range(0, spec.most * PLACES + 1, 3):
        assert followed(spec, [held] * 40)[-1] * PLACES >= held


def test_verifiers_go_one_in_five_minutes(hpa):
    spec = spec_of(hpa)
    replicas = followed(spec, [spec.most * PLACES] * 40 + [0] * 300)
    gone = [step * SYNC_S for step, (was, now) in enumerate(itertools.pairwise(replicas)) if now < was]
    assert replicas[-1] == spec.least
    assert len(gone) == spec.most - spec.least
    assert all(later - earlier >= 300 for earlier, later in itertools.pairwise(gone))
    assert gone[0] >= 40 * SYNC_S + spec.down.window_s - 2 * SYNC_S


def test_a_target_without_room_is_noticed(hpa):
    """With more sessions for each verifier than it has places the same load ends verifiers that are needed."""
    spec = spec_of(hpa)
    packed = replace(spec, targets=(Target("AverageValue", 1.5 * PLACES), Target("Value", 10)))
    held = spec.most * PLACES // 2
    assert followed(packed, [held] * 40)[-1] * PLACES < held
