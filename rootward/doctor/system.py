"""Checks of a running system from one machine: its gateway, and every worker, Redis and certificate that can be reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rootward.addresses import split_host_port
from rootward.client import AsyncClient
from rootward.client.connection import parse_target
from rootward.client.types import Load, ServerInfo
from rootward.doctor import Finding, Level, graded
from rootward.errors import APIConnectionError, APITimeoutError, ConfigurationError, RootwardError, Unavailable
from rootward.wire.tls import Certificates, ClientTls, read_pem

T = TypeVar("T")

TIMEOUT_S = 5.0
ASKS = 5  # calls to a process, of which the shortest is the round trip
FAR_MS = 10.0  # round trip to a drafter
LATE_MS = 100.0  # from a commit to the first growth of a drafter after it
SKEW_S = 1.0
LARGE_SKEW_S = 30.0
FULL = 0.98  # of KV cells
NEARLY_FULL = 0.9  # of KV cells, or of the memory of Redis
DAYS_LEFT = 14
SLOW_REDIS_MS = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A process. error: why it did not answer, "" if it did. skew_s: its clock ahead of ours."""

    role: str
    address: str
    error: str = ""
    version: str = ""
    rtt_ms: float = 0.0
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RedisSeen:
    """policy: what is evicted when memory is full, "" where the user may not ask. used: share of maxmemory, 0 without a limit."""

    error: str = ""
    rtt_ms: float = 0.0
    policy: str = ""
    used: float = 0.0
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CertificateSeen:
    address: str
    days_left: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """The facts that could be collected. redis: None if no URL was given; certificates: of addresses with TLS."""

    gateway: Seen
    info: ServerInfo | None = None
    load: Load | None = None
    workers: Sequence[Seen] = ()
    redis: RedisSeen | None = None
    certificates: Sequence[CertificateSeen] = ()


# -- judgement ------------------------------------------------------------------------------------------------------------


def judge(system: System) -> list[Finding]:
    """The findings; for a gateway that does not answer, that and its certificates."""
    certificates = [_certificate(one) for one in system.certificates]
    if system.info is None or system.load is None:
        advice = "start it (rootward serve all), or correct --gateway (grpcs:// where it has TLS), --api-key and --tls-authority"
        found = f"{system.gateway.address}: {system.gateway.error}"
        return [Finding("gateway", Level.PROBLEM, found, advice), *certificates]
    judged = [
        _gateway(system.gateway, system.load),
        _verifiers(system.info),
        _drafters(system.info, system.load),
        _audit(system.load),
        _distance(system.workers, system.load),
        _speculation(system.load),
        _versions(system),
        _clocks(system),
        _kv(system.load),
        _silent(system),
        _redis(system.redis) if system.redis is not None else None,
    ]
    return [finding for finding in judged if finding is not None] + certificates


def _gateway(gateway: Seen, load: Load) -> Finding:
    found = f"{gateway.address} answers in {gateway.rtt_ms:.1f} ms"
    return graded("gateway", found, "it drains: new requests are refused", warning=load.draining)


def _verifiers(info: ServerInfo) -> Finding:
    num_ready = sum(one.ready for one in info.verifiers)
    away = [one.address for one in info.verifiers if not one.ready and not one.draining]
    advice = f"not ready: {', '.join(away)}; see its log, and whether its model and tokenizer are those of the others"
    if not num_ready:
        advice = "nothing is served; start one: rootward serve verifier --model TARGET (see its log if it runs)"
    found = f"{num_ready} of {len(info.verifiers)} ready"
    return graded("verifiers", found, advice, problem=not num_ready, warning=bool(away))


def _drafters(info: ServerInfo, load: Load) -> Finding:
    number = len(info.drafters)
    alone = sum(one.stats.get("drafters_left_alone", 0.0) for one in load.verifiers)
    advice = f"{alone:.0f} answered late or wrongly and gets no sessions for a while; see its log and its load"
    if not number:
        advice = "trees are looked up in the text, or grown by a head; start drafters where `rootward plan` says that they pay"
    return graded("drafters", f"{number} connected", advice, warning=not number or alone > 0)


def _audit(load: Load) -> Finding | None:
    if not load.caught_drafters:
        return None
    advice = "it draws from another distribution than it declares: replace it (docs/operations/drafters.md)"
    return Finding("audit", Level.PROBLEM, f"caught: {', '.join(load.caught_drafters)}", advice)


def _distance(workers: Sequence[Seen], load: Load) -> Finding | None:
    rtts = {one.address: one.rtt_ms for one in workers if one.role == "drafter" and not one.error}
    late: dict[str, float] = {}  # the largest time that a verifier has measured, by drafter
    for verifier in load.verifiers:
        for address, ms in verifier.of_drafters("drafter_first_growth_ms").items():
            late[address] = max(ms, late.get(address, ms))
    parts = [f"round trip from here {max(rtts.values()):.1f} ms at most"] if rtts else []
    parts += [f"first growth after {max(late.values()):.0f} ms at most"] if late else []
    if not parts:
        return None
    advice = ""
    if far := [f"{address} ({ms:.0f} ms)" for address, ms in rtts.items() if ms > FAR_MS]:
        advice = f"far away: {', '.join(far)}; put drafters into the zone of the verifier, or let them grow ahead"
    elif slow := [f"{address} ({ms:.0f} ms)" for address, ms in late.items() if ms > LATE_MS]:
        advice = f"slow: {', '.join(slow)}; a smaller draft, more drafters, or fewer sessions on each"
    return graded("distance", ", ".join(parts), advice, warning=bool(advice))


def _speculation(load: Load) -> Finding | None:
    tried = [one.speedup for one in load.verifiers if one.speedup not in (None, 1.0)]
    if not tried:
        return None
    worst = min(tried)
    advice = "speculation gains nothing there and is switched off; `rootward plan TARGET DRAFT` says what would help"
    return graded("speculation", f"{worst:.2f} x of plain decoding", advice, warning=worst < 1.0)


def _versions(system: System) -> Finding:
    versions = {f"{one.role} {one.address}": one.version for one in _answering(system)}
    different = sorted(set(versions.values()))
    old = [name for name, version in versions.items() if version != system.gateway.version]
    advice = f"not that of the gateway: {', '.join(old)}; finish the upgrade (docs/operations/upgrades.md)"
    return graded("versions", ", ".join(different), advice, warning=len(different) > 1)


def _clocks(system: System) -> Finding:
    skews = {f"{one.role} {one.address}": abs(one.skew_s) for one in _answering(system)}
    if system.redis is not None:
        skews["redis"] = abs(system.redis.skew_s)
    name, skew_s = max(skews.items(), key=itemgetter(1))
    advice = f"set the clock of {name} (chrony or NTP): certificates, logs and traces go by it"
    found = f"at most {skew_s:.2f} s from ours"
    return graded("clocks", found, advice, problem=skew_s > LARGE_SKEW_S, warning=skew_s > SKEW_S)


def _kv(load: Load) -> Finding | None:
    name = "kv_cache_usage_ratio"
    usage = {one.name: one.stats[name] for one in load.verifiers if name in one.stats}
    if not usage:
        return None
    fullest, used = max(usage.items(), key=itemgetter(1))
    preempted = sum(one.stats.get("num_preemptions_total", 0.0) for one in load.verifiers)
    advice = (
        f"{fullest}: sessions wait or are preempted; more --kv-cache-tokens, fewer --max-num-seqs, or another verifier"
    )
    found = f"{used:.0%} used at most, {preempted:.0f} preemptions"
    return graded("KV memory", found, advice, problem=used > FULL, warning=used > NEARLY_FULL)


def _silent(system: System) -> Finding | None:
    silent = [f"{one.role} {one.address} ({one.error})" for one in system.workers if one.error]
    if not silent:
        return None
    advice = "versions, clocks and distances of these are unknown; run doctor where they can be reached, with --tls-* if they ask for it"
    return Finding("workers", Level.WARNING, f"no answer here: {'; '.join(silent)}", advice)


def _redis(redis: RedisSeen) -> Finding:
    if redis.error:
        advice = "sessions and leases are lost with the gateway while it is away; start it, or correct --redis-url"
        return Finding("redis", Level.PROBLEM, redis.error, advice)
    evicts = redis.policy not in ("", "noeviction")
    nearly_full = redis.used > NEARLY_FULL
    advice = ""
    if evicts:
        advice = "leases may be evicted: set maxmemory-policy noeviction"
    elif nearly_full:
        advice = "it will refuse writes: raise maxmemory, or lower the lifetime of sessions"
    elif not redis.policy:
        advice = "its maxmemory policy is unknown, for this user may not ask; make sure that it is noeviction"
    elif redis.rtt_ms > SLOW_REDIS_MS:
        advice = "it is slow or far away: put it near the gateways"
    found = f"answers in {redis.rtt_ms:.1f} ms, {redis.policy or 'policy unknown'}, {redis.used:.0%} used"
    return graded("redis", found, advice, problem=evicts or nearly_full, warning=bool(advice))


def _certificate(seen: CertificateSeen) -> Finding:
    name = f"certificate {seen.address}"
    if seen.error:
        return Finding(name, Level.PROBLEM, seen.error, "renew it, or name its authority with --tls-authority")
    advice = "renew it now: callers refuse it after that"
    return graded(name, f"{seen.days_left:.0f} days left", advice, warning=seen.days_left < DAYS_LEFT)


def _answering(system: System) -> list[Seen]:
    return [one for one in (system.gateway, *system.workers) if not one.error]


# -- facts --------------------------------------------------------------------------------------------------------------------


async def look(
    url: str,
    *,
    api_key: str = "",
    redis_url: str = "",
    authority: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> System:
    """Asks everything, side by side, each call for a few seconds at most.

    authority, certificate and key are PEM files; workers with mutual TLS need all three."""
    (address, *_), secure = parse_target(url)
    certificates = []
    tls = None
    if secure:
        if authority is not None:
            tls = grpc.ssl_channel_credentials(read_pem("--tls-authority", authority))
        certificates.append(await asyncio.to_thread(_certificate_of, address, authority))
    async with AsyncClient(url, api_key=api_key or None, tls=tls, timeout=TIMEOUT_S, max_retries=0) as client:
        try:
            info, rtt_s, asked_s = await _fastest(client.server_info)
            load = await client.load()
        except RootwardError as error:
            lost = isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)
            # the text of a lost connection is a status of gRPC; why TLS fails is said by the certificate
            said = "no gateway answers there" if lost else str(error).splitlines()[0]
            return System(Seen("gateway", address, said), certificates=certificates)
    gateway = Seen("gateway", address, "", info.version, 1e3 * rtt_s, info.clock_s - asked_s)
    as_caller = ClientTls(Certificates(certificate, key, authority)) if certificate and key and authority else None
    workers = await asyncio.gather(
        *(_worker("verifier", one.address, as_caller) for one in info.verifiers),
        *(_worker("drafter", one.address, as_caller) for one in info.drafters),
    )
    redis = await _redis_at(redis_url) if redis_url else None
    return System(gateway, info, load, workers, redis, certificates)


async def _fastest(ask: Callable[[], Awaitable[T]]) -> tuple[T, float, float]:
    """(answer, its seconds, our clock half way) of the shortest of several calls, after one that connects."""
    await ask()
    calls = []
    for _ in range(ASKS):
        asked_s = time.time()
        begun_s = time.perf_counter()
        answer = await ask()
        rtt_s = time.perf_counter() - begun_s
        calls.append((answer, rtt_s, asked_s + rtt_s / 2))
    return min(calls, key=itemgetter(1))


async def _worker(role: str, address: str, tls: ClientTls | None) -> Seen:
    from rootward.wire.clients import RemoteDrafter, RemoteVerifier

    kind: Callable[..., Any] = RemoteVerifier if role == "verifier" else RemoteDrafter
    try:
        async with kind(address, tls=tls, rpc_timeout_s=TIMEOUT_S) as worker:
            info, rtt_s, asked_s = await _fastest(worker.get_info)
    except (RootwardError, OSError) as error:
        return Seen(role, address, str(error).splitlines()[0])
    return Seen(role, address, "", info.version, 1e3 * rtt_s, info.clock_s - asked_s)


async def _redis_at(url: str) -> RedisSeen:
    """ConfigurationError for a wrong URL."""
    from redis.exceptions import RedisError

    from rootward.redis_client import answering, open_redis, server_time

    client: Any = open_redis(url, timeout_s=TIMEOUT_S)
    memory: dict[str, Any] = {}
    try:
        async with answering("redis", TIMEOUT_S, Unavailable):
            clock_s, rtt_s, asked_s = await _fastest(lambda: server_time(client))
            with suppress(RedisError):  # this user may not ask
                memory = await client.info("memory")
    except Unavailable as error:
        return RedisSeen(str(error))
    finally:
        await client.aclose()
    if memory and "used_memory" not in memory:  # of a cluster, by node
        memory = next(iter(memory.values()))
    limit = float(memory.get("maxmemory", 0))
    used = float(memory["used_memory"]) / limit if limit else 0.0
    return RedisSeen("", 1e3 * rtt_s, str(memory.get("maxmemory_policy", "")), used, clock_s - asked_s)


def _certificate_of(address: str, authority: Path | None) -> CertificateSeen:
    """That of a server that speaks TLS, checked as a client does. ConfigurationError for an authority that is none."""
    host, port = split_host_port(address)
    try:
        context = ssl.create_default_context(cafile=str(authority) if authority is not None else None)
    except OSError as error:
        raise ConfigurationError(
            f"--tls-authority: '{authority}' has no certificates ({error}); name a PEM file"
        ) from None
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return CertificateSeen(address, error=error.verify_message or "not valid")
    except OSError as error:
        return CertificateSeen(address, error=f"cannot be read ({error})")
    ends_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return CertificateSeen(address, (ends_s - time.time()) / 86400)
