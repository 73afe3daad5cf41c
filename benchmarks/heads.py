"""A draft head in the verifier, in a drafter beside it, and in a drafter some way off, and n-grams: tokens per second of one session.

    python -m benchmarks.heads --target FOLDER --head FOLDER --out RESULT.json

Two verifiers and a drafter run as processes, idle but for those whose turn it is; a distant drafter is the same one behind a link with that
delay (`benchmarks.slow_link`). Every system answers the same prompts with `--nodes` draft nodes a
round, whether or not that pays, so that their rounds are equal; `plain` has none. The exit code is 3 if a greedy text is not that of plain
decoding (`--temperature 0`, the default).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.results import markdown_table, save
from benchmarks.services import free_port, scraped, service, verifier_with_drafters
from benchmarks.slow_link import Conditions, SlowLink
from benchmarks.turns import balanced_order
from rootward import demo
from rootward.core.requests import Rule, Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.engine.tokenizers import load_tokenizer
from rootward.host import threads_of_drafters
from rootward.wire.clients import RemoteVerifier

FEATURE_BYTES = "rootward_draft_feature_bytes_total"
RULES = {"traversal": Rule.TRAVERSAL, "coupled": Rule.MATCH}
LOCAL, LOOKED_UP = "head in the verifier", "n-grams in the verifier"
Texts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class System:
    """pool: what it asks for drafts, "": nothing; rtt_ms: to a drafter."""

    name: str
    pool: str = ""
    rtt_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one system in one turn. feature_bytes: per round, sent to the drafter."""

    system: str
    turn: int
    tokens_per_s: float
    tokens_per_round: float
    feature_bytes: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two verifiers, one with the head and one with a drafter that has it; the drafter is there twice: directly, and behind the link."""

    local: RemoteVerifier
    remote: RemoteVerifier
    admin: str  # of the latter
    link: SlowLink

    async def run(
        self, system: System, turn: int, prompts: Sequence[Sequence[int]], given: argparse.Namespace
    ) -> tuple[Run, Texts]:
        """All prompts, one after the other. The time of a prompt's first tokens does not count."""
        mode = SpeculationMode.DISABLED if system.name == "plain" else SpeculationMode.REQUIRED
        speculation = Speculation(
            mode, rule=RULES[given.verification], drafter=system.pool, num_draft_tokens=given.nodes
        )
        verifier = self.local if system.name in (LOCAL, LOOKED_UP) else self.remote
        self.link.conditions = Conditions(system.rtt_ms / 2e3)
        then = await asyncio.to_thread(scraped, self.admin)
        seconds = 0.0
        tokens = 0
        rounds = 0
        texts: list[tuple[int, ...]] = []
        for i, prompt in enumerate(prompts):
            name = f"{system.name}-{turn}-{i}".replace(" ", "-")
            text: list[int] = []
            begun_s = 0.0
            wanted = VerifierRequest(
                name,
                tuple(prompt),
                Sampling(given.temperature),
                Stopping(given.tokens),
                speculation,
                seed=turn,
                cache_salt=f"{system.name}-{turn}",  # n-grams must not know the answers of the turn before
            )
            async for run in verifier.generate(wanted):
                if text:
                    tokens, rounds = tokens + len(run.tokens), rounds + 1
                else:
                    begun_s = time.perf_counter()
                text += run.tokens
            seconds += time.perf_counter() - begun_s
            texts.append(tuple(text))
        sent = (await asyncio.to_thread(scraped, self.admin))[FEATURE_BYTES] - then[FEATURE_BYTES]
        return Run(system.name, turn, tokens / seconds, tokens / rounds, sent / rounds), tuple(texts)


@asynccontextmanager
async def running(given: argparse.Namespace) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        size = ("--max-num-seqs", "2", "--max-model-len", "1024")
        own = ("--model", f"head:{given.head}", "--target", given.target, "--feature-dtype", given.feature_dtype)
        drafter = await enter(service("drafter_service", *own, *size, "--num-threads", str(given.drafter_threads)))
        link = await enter(SlowLink(drafter))
        of_verifier = ("--model", given.target, "--draft-wait-ms", "5000", *size, "--num-threads", str(given.threads))
        local = await enter(service("verifier_service", *of_verifier, "--local-draft", f"head:{given.head}"))
        admin = f"127.0.0.1:{free_port()}"
        flags = ("--draft-head", given.head, "--local-draft", "none", "--admin-listen", admin)
        flags += ("--drafters", f"near={drafter},far={link.address}")
        remote = await enter(service("verifier_service", *of_verifier, *flags))
        yield Deployment(
            local=await enter(RemoteVerifier(local)),
            remote=await enter(verifier_with_drafters(remote, 2)),
            admin=admin,
            link=link,
        )


async def measured(given: argparse.Namespace) -> tuple[list[Run], bool]:
    """The runs of all turns but the first, which warms up; and whether all greedy texts were those of plain decoding."""
    tokenizer = load_tokenizer(given.target)
    chats = [[{"role": "user", "content": text}] for text in demo.chats()[: given.prompts]]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    systems = [System("plain"), System(LOCAL, "head"), System(LOOKED_UP, "ngram+recycling")]
    systems += [System("drafter beside it", "near")]
    systems += [System(f"drafter, {rtt_ms:g} ms", "far", rtt_ms) for rtt_ms in given.rtts]
    found: list[Run] = []
    said: set[Texts] = set()
    async with running(given) as deployment:
        for turn in range(given.turns + 1):
            for system in balanced_order(systems, turn):
                run, texts = await deployment.run(system, turn, prompts, given)
                said.add(texts)
                print(
                    f"{system.name}: {run.tokens_per_s:.1f} tokens/s, {run.tokens_per_round:.2f} a round",
                    file=sys.stderr,
                    flush=True,
                )
                found += [run] if turn else []
    return found, given.temperature > 0 or len(said) == 1


def report(found: Sequence[Run]) -> str:
    """Medians over the turns, as a table."""
    local = {run.turn: run.tokens_per_s for run in found if run.system == LOCAL}
    rows = []
    for name in sorted({run.system for run in found}, key=lambda name: (name != "plain", name != LOCAL, name)):
        own = [run for run in found if run.system == name]
        speed = median(run.tokens_per_s for run in own)
        share = median(run.tokens_per_s / local[run.turn] for run in own)
        tokens = median(run.tokens_per_round for run in own)
        sent = median(run.feature_bytes for run in own)
        rows.append((name, f"{speed:.1f}", f"{share:.2f}", f"{tokens:.2f}", f"{sent:.0f}"))
    header = ("system", "tokens/s", "of the head in the verifier", "tokens a round", "bytes of features a round")
    return markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--head", default=str(demo.smollm2_head()), help="folder of its draft head")
    parser.add_argument("--rtts", type=float, nargs="*", default=[5.0, 20.0], help="round trips to drafters, in ms")
    parser.add_argument("--feature-dtype", default="bfloat16", choices=("bfloat16", "int8"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", choices=[*RULES], default="traversal", help="at temperatures above 0")
    parser.add_argument("--nodes", type=int, default=4, help="draft nodes of a round")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=3, help="after one that warms up")
    parser.add_argument("--threads", type=int, default=2, help="of a verifier")
    parser.add_argument("--drafter-threads", type=int, help="default: as many as the verifier, as in `serve all`")
    parser.add_argument("--out", type=Path, help="JSON result")
    given = parser.parse_args(argv)
    given.drafter_threads = given.drafter_threads or threads_of_drafters(given.threads, 1, have_heads=True)
    found, equal = asyncio.run(measured(given))
    print(report(found))
    if not given.temperature:
        print(f"\ngreedy texts are those of plain decoding: {equal}")
    if given.out is not None:
        options = {name: str(value) for name, value in vars(given).items() if name not in ("target", "head", "out")}
        save(given.out, {**options, "texts_equal": equal, "runs": [asdict(run) for run in found]})
    return 0 if equal else 3


if __name__ == "__main__":
    sys.exit(main())
