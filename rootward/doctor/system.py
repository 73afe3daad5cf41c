"""Checks of a running system from one machine: its gateway, and every worker, Redis and certificate that can be reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rootward.addresses import split_host_port
from rootward.client import AsyncClient
from rootward.client.connection import parse_target
from rootward.client.types import Load, ServerInfo, VerifierLoad
from rootward.doctor.findings import Finding, Level, graded
from rootward.errors import RootwardError, Unavailable
from rootward.wire.tls import Certificates, ClientTls, read_pem

TIMEOUT_S = 5.0
ASKS = 5  # calls to a worker, of which the shortest is the round trip
FAR_MS = 10.0  # round trip to a drafter
LATE_MS = 100.0  # from a commit to the first growth of a drafter after it
SKEW_S, LARGE_SKEW_S = 1.0, 30.0
KV_FULL, KV_NEARLY_FULL = 0.98, 0.9
DAYS_LEFT = 14
SLOW_REDIS_MS = 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A process. error: why it did not answer, "" if it did. skew_s: its clock ahead of ours. tokenizer: content hash, "" without one."""

    role: str
    address: str
    error: str = ""
    version: str = ""
    tokenizer: str = ""
    rtt_ms: float = 0.0
    skew_s: float | None = None


@dataclass(frozen=True, slots=True)
class RedisSeen:
    """policy: what is evicted when memory is full, "" where the user may not ask. used: share of maxmemory, 0 without a limit."""

    error: str = ""
    rtt_ms: float = 0.0
    policy: str = ""
    used: float = 0.0
    skew_s: float | None = None


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

    @property
    def verifiers(self) -> tuple[VerifierLoad, ...]:
        return () if self.load is None else self.load.verifiers


@dataclass(frozen=True, slots=True)
class Access:
    """Address and credentials of a system. authority, certificate and key are PEM files; workers with mutual TLS need all three."""

    url: str
    api_key: str = ""
    redis_url: str = ""
    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def secure(self) -> bool:
        """Whether the gateway is called with TLS."""
        return parse_target(self.url)[1]

    @property
    def address(self) -> str:
        return parse_target(self.url)[0][0]


# -- judgement ------------------------------------------------------------------------------------------------------------


def judge(system: System) -> list[Finding]:
    """The findings; for a gateway that does not answer, that and its certificates."""
    if system.info is None or system.load is None:
        advice = "start it (rootward serve all), or correct --gateway, --api-key and --tls-authority"
        found = f"{system.gateway.address}: {system.gateway.error}"
        return [Finding("gateway", Level.PROBLEM, found, advice), *map(_certificate, system.certificates)]
    judged = [
        _gateway(system),
        _verifiers(system),
        _drafters(system),
        _trust(system),
        _distance(system),
        _pays(system),
        _versions(system),
        _tokenizers(system),
        _clocks(system),
        _queue(system),
        _kv(system),
        _unseen(system),
        *([_redis(system.redis)] if system.redis is not None else []),
        *map(_certificate, system.certificates),
    ]
    return [finding for finding in judged if finding is not None]


def _gateway(system: System) -> Finding:
    assert system.load is not None
    found = f"{system.gateway.address} answers in {system.gateway.rtt_ms:.1f} ms"
    warning = "it drains: new requests are refused" if system.load.draining else ""
    return graded("gateway", found, warning=warning)


def _verifiers(system: System) -> Finding:
    assert system.info is not None
    every = system.info.verifiers
    ready = [one for one in every if one.ready]
    away = [one.address for one in every if not one.ready and not one.draining]
    problem = (
        "" if ready else "nothing is served; start one: rootward serve verifier --model TARGET (see its log if it runs)"
    )
    warning = f"not ready: {', '.join(away)}; see its log, and whether its model and tokenizer are those of the others"
    return graded("verifiers", f"{len(ready)} of {len(every)} ready", problem=problem, warning=warning if away else "")


def _drafters(system: System) -> Finding:
    assert system.info is not None
    number = len(system.info.drafters)
    alone = sum(one.stats.get("drafters_left_alone", 0.0) for one in system.verifiers)
    warning = ""
    if not number:
        warning = "trees are looked up in the text, or grown by a head; start drafters where `rootward plan` says that they pay"
    elif alone:
        warning = f"{alone:.0f} answered late or wrongly and gets no sessions for a while; see its log and its load"
    return graded("drafters", f"{number} connected", warning=warning)


def _trust(system: System) -> Finding | None:
    assert system.load is not None
    names = system.load.caught_drafters
    if not names:
        return None
    advice = "it draws from another distribution than it declares: replace it (docs/operations/drafters.md)"
    return Finding("audit", Level.PROBLEM, f"caught: {', '.join(names)}", advice)


def _distance(system: System) -> Finding | None:
    drafters = [one for one in system.workers if one.role == "drafter" and not one.error]
    late: dict[str, float] = {}  # the largest time that a verifier has measured, by drafter
    for verifier in system.verifiers:
        for address, ms in verifier.of_drafters("drafter_first_growth_ms").items():
            late[address] = max(ms, late.get(address, ms))
    if not drafters and not late:
        return None
    far = [f"{one.address} ({one.rtt_ms:.0f} ms)" for one in drafters if one.rtt_ms > FAR_MS]
    slow = [f"{name} ({ms:.0f} ms)" for name, ms in late.items() if ms > LATE_MS]
    parts = []
    if drafters:
        parts.append(f"round trip from here {max(one.rtt_ms for one in drafters):.1f} ms at most")
    if late:
        parts.append(f"first growth after {max(late.values()):.0f} ms at most")
    warning = ""
    if far:
        warning = f"far away: {', '.join(far)}; put drafters into the zone of the verifier, or let them grow ahead"
    elif slow:
        warning = f"slow: {', '.join(slow)}; a smaller draft, more drafters, or fewer sessions on each"
    return graded("distance", ", ".join(parts), warning=warning)


def _pays(system: System) -> Finding | None:
    tried = [one.speedup for one in system.verifiers if one.speedup not in (None, 1.0)]
    if not tried:
        return None
    worst = min(tried)
    warning = "speculation gains nothing there and is switched off; `rootward plan TARGET DRAFT` says what would help"
    return graded("speculation", f"{worst:.2f} x of plain decoding", warning=warning if worst < 1.0 else "")


def _versions(system: System) -> Finding:
    versions = {f"{one.role} {one.address}": one.version for one in _answering(system) if one.version}
    different = sorted(set(versions.values()))
    old = [name for name, version in versions.items() if version != system.gateway.version]
    warning = f"not that of the gateway: {', '.join(old)}; finish the upgrade (docs/operations/upgrades.md)"
    return graded("versions", ", ".join(different) or "unknown", warning=warning if len(different) > 1 else "")


def _tokenizers(system: System) -> Finding | None:
    hashes = {one.tokenizer for one in system.workers if one.tokenizer}
    if not hashes:
        return None
    problem = "use one tokenizer everywhere; `rootward check-pair TARGET DRAFT` shows the first differing token"
    return graded("tokenizers", f"{len(hashes)} kind(s)", problem=problem if len(hashes) > 1 else "")


def _clocks(system: System) -> Finding | None:
    skews = {f"{one.role} {one.address}": one.skew_s for one in _answering(system) if one.skew_s is not None}
    if system.redis is not None and system.redis.skew_s is not None:
        skews["redis"] = system.redis.skew_s
    if not skews:
        return None
    name = max(skews, key=lambda one: abs(skews[one]))
    skew_s = skews[name]
    advice = f"set the clock of {name} (chrony or NTP): certificates, logs and traces go by it"
    found = f"at most {abs(skew_s):.2f} s from ours"
    late = abs(skew_s)
    return graded(
        "clocks", found, problem=advice if late > LARGE_SKEW_S else "", warning=advice if late > SKEW_S else ""
    )


def _queue(system: System) -> Finding:
    assert system.load is not None
    load = system.load
    found = f"{load.num_running} running, {load.num_waiting} waiting"
    warning = "requests wait for a slot: add verifiers, or raise --max-num-seqs where memory allows"
    return graded("requests", found, warning=warning if load.num_waiting > load.num_running else "")


def _kv(system: System) -> Finding | None:
    usage = {
        one.name: one.stats["kv_cache_usage_ratio"] for one in system.verifiers if "kv_cache_usage_ratio" in one.stats
    }
    if not usage:
        return None
    name = max(usage, key=usage.__getitem__)
    preempted = sum(one.stats.get("num_preemptions_total", 0.0) for one in system.verifiers)
    advice = (
        f"{name}: sessions wait or are preempted; more --kv-cache-tokens, fewer --max-num-seqs, or another verifier"
    )
    found = f"{usage[name]:.0%} used at most, {preempted:.0f} preemptions"
    full = usage[name] > KV_FULL
    return graded(
        "KV memory", found, problem=advice if full else "", warning=advice if usage[name] > KV_NEARLY_FULL else ""
    )


def _unseen(system: System) -> Finding | None:
    silent = [f"{one.role} {one.address} ({one.error})" for one in system.workers if one.error]
    if not silent:
        return None
    advice = "versions, clocks and distances of these are unknown; run doctor where they can be reached, with --tls-* if they ask for it"
    return Finding("workers", Level.WARNING, f"no answer here: {'; '.join(silent)}", advice)


def _redis(redis: RedisSeen) -> Finding:
    if redis.error:
        advice = "sessions and leases are lost with the gateway while it is away; start it, or correct --redis-url"
        return Finding("redis", Level.PROBLEM, redis.error, advice)
    problem = warning = ""
    if redis.policy and redis.policy != "noeviction":
        problem = "leases may be evicted: set maxmemory-policy noeviction"
    elif redis.used > KV_NEARLY_FULL:
        problem = "it will refuse writes: raise maxmemory, or lower the lifetime of sessions"
    elif not redis.policy:
        warning = "its maxmemory policy is unknown, for this user may not ask; make sure that it is noeviction"
    elif redis.rtt_ms > SLOW_REDIS_MS:
        warning = "it is slow or far away: put it near the gateways"
    policy = redis.policy or "policy unknown"
    return graded(
        "redis", f"answers in {redis.rtt_ms:.1f} ms, {policy}, {redis.used:.0%} used", problem=problem, warning=warning
    )


def _certificate(seen: CertificateSeen) -> Finding:
    name = f"certificate {seen.address}"
    if seen.error:
        return Finding(name, Level.PROBLEM, seen.error, "renew it, or name its authority with --tls-authority")
    advice = "renew it now: callers refuse it after that"
    return graded(name, f"{seen.days_left:.0f} days left", warning=advice if seen.days_left < DAYS_LEFT else "")


def _answering(system: System) -> list[Seen]:
    return [one for one in (system.gateway, *system.workers) if not one.error]


# -- facts --------------------------------------------------------------------------------------------------------------------


async def look(access: Access) -> System:
    """Asks everything once, side by side, each for a few seconds at most."""
    certificates = [await asyncio.to_thread(_certificate_of, access.address, access.authority)] if access.secure else []
    tls = _channel_credentials(access)
    async with AsyncClient(
        access.url, api_key=access.api_key or None, tls=tls, timeout=TIMEOUT_S, max_retries=0
    ) as client:
        try:
            await client.server_info()  # connects
            sent_s, begun_s = time.time(), time.perf_counter()
            info = await client.server_info()
            rtt_s = time.perf_counter() - begun_s
            load = await client.load()
        except RootwardError as error:
            return System(Seen("gateway", access.address, str(error).splitlines()[0]), certificates=certificates)
    gateway = Seen(
        "gateway",
        access.address,
        version=info.version,
        rtt_ms=1e3 * rtt_s,
        skew_s=_skew(info.clock_s, sent_s, rtt_s),
    )
    asked: list[Coroutine[Any, Any, Seen]] = [_worker("verifier", one.address, access) for one in info.verifiers]
    asked += [_worker("drafter", one.address, access) for one in info.drafters]
    workers = await asyncio.gather(*asked)
    redis = await _redis_at(access.redis_url) if access.redis_url else None
    return System(gateway, info, load, workers, redis, certificates)


async def _worker(role: str, address: str, access: Access) -> Seen:
    from rootward.wire.clients import RemoteDrafter, RemoteVerifier

    files = (access.certificate, access.key, access.authority)
    tls = ClientTls(Certificates(*files)) if all(files) else None  # type: ignore[arg-type]
    kind: Callable[..., Any] = RemoteVerifier if role == "verifier" else RemoteDrafter
    try:
        async with kind(address, tls=tls, rpc_timeout_s=TIMEOUT_S) as worker:
            await worker.get_info()  # connects
            times = []
            for _ in range(ASKS):
                sent_s, begun_s = time.time(), time.perf_counter()
                info = await worker.get_info()
                times.append(time.perf_counter() - begun_s)
    except (RootwardError, OSError) as error:
        return Seen(role, address, str(error).splitlines()[0])
    skew_s = _skew(info.clock_s, sent_s, times[-1])
    return Seen(role, address, "", info.version, info.model.tokenizer_hash, 1e3 * min(times), skew_s)


def _skew(clock_s: float, sent_s: float, rtt_s: float) -> float | None:
    """Seconds by which a clock that was read half a round trip after sent_s is ahead of ours; None for a peer that does not send it."""
    return clock_s - (sent_s + rtt_s / 2) if clock_s else None


async def _redis_at(url: str) -> RedisSeen:
    """ConfigurationError for a wrong URL."""
    from redis.exceptions import RedisError

    from rootward.redis_client import answering, open_redis, server_time

    client: Any = open_redis(url, timeout_s=TIMEOUT_S)
    try:
        async with answering("redis", TIMEOUT_S, Unavailable):
            await client.ping()
            sent_s, begun_s = time.time(), time.perf_counter()
            clock_s = await server_time(client)
            rtt_s = time.perf_counter() - begun_s
        policy = ""
        used = 0.0
        try:
            async with answering("redis", TIMEOUT_S, Unavailable):
                memory = await client.info("memory")
                memory = next(iter(memory.values())) if "used_memory" not in memory else memory
                policy = str(memory.get("maxmemory_policy", ""))
                limit = float(memory.get("maxmemory", 0))
                used = float(memory["used_memory"]) / limit if limit else 0.0
        except Unavailable as error:
            if not isinstance(error.__cause__, RedisError):
                raise
    except Unavailable as error:
        return RedisSeen(str(error))
    finally:
        await client.aclose()
    return RedisSeen("", 1e3 * rtt_s, policy, used, _skew(clock_s, sent_s, rtt_s))


def _certificate_of(address: str, authority: Path | None) -> CertificateSeen:
    """That of a server that speaks TLS, checked as a client does."""
    host, port = split_host_port(address)
    context = ssl.create_default_context(cafile=str(authority) if authority is not None else None)
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


def _channel_credentials(access: Access) -> Any:
    if access.authority is None or not access.secure:
        return None

    return grpc.ssl_channel_credentials(read_pem("tls-authority", access.authority))
