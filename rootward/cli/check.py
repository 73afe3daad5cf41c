"""`rootward check TARGET [DRAFT]`: compares the texts of a model with and without speculation, through the services."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Annotated

import typer

from rootward.cli.options import Output, OutputFormat
from rootward.cli.serve import address_of, require_names, services_running
from rootward.client import AsyncClient, GenerationResult, SamplingParams
from rootward.errors import ConfigurationError

TEXTS = (
    "Explain how rainbows form, step by step.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "List the planets of the solar system and one fact about each of them:\n1.",
    "Once upon a time there was a fox who lived at the edge of a wood.",
    "one two three four one two three four one two three",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    '{"name": "Ada", "year": 1815}, {"name": "Alan", "year": 1912}, {"name":',
    "Write a short letter to a friend about a journey by train.",
)
WITHOUT_MODEL = "ngram+recycling:"  # n-grams of the text, and Token Recycling
COMPARED_TOKENS = 3  # of every sampled text, its first ones
LEAST_COUNT = 10  # of a token in both samples together; rarer ones are one category
AT_ONCE = 16  # generations
PLAIN, TREES = "disabled", "required"  # speculation
WITH_SEEDS, WITHOUT = "temperature 1 with seeds, next tokens", "temperature 1, next tokens"


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison. `failures` of `number` texts or tests differ."""

    name: str
    failures: int
    number: int
    remark: str = ""


def check(
    target: Annotated[str, typer.Argument(help="Target model: folder, hub name, GGUF file, or demo: the shipped one.")],
    draft: Annotated[str, typer.Argument(help="Draft model (default: drafts without a model).")] = WITHOUT_MODEL,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts whose greedy texts are compared.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each greedy text.")] = 64,
    samples: Annotated[
        int, typer.Option(min=0, help="Texts sampled with and without trees for each tested prompt.")
    ] = 400,
    contexts: Annotated[int, typer.Option(min=0, help="Prompts with sampled texts.")] = 3,
    error_rate: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Probability that a lossless model fails the test of samples.")
    ] = 1e-3,
    dtype: Annotated[str, typer.Option(help="Data type of the weights, as the verifier's --dtype.")] = "auto",
    device: Annotated[str, typer.Option(help="Device of the target, as the verifier's --device.")] = "cpu",
    start_timeout_s: Annotated[
        float, typer.Option(min=1, help="Seconds until the services must have started.")
    ] = 300.0,
    output: Output = OutputFormat.text,
) -> None:
    """Check that speculation is lossless for a model, on this machine.

    Starts the services. At temperature 0 the texts with trees, alone and in a batch, must equal those of plain decoding. At temperature 1
    the next tokens with trees, drawn with and without seeds, are compared with those of plain decoding by chi-square tests: requests with a
    seed are verified by match, others by traversal. Exit code 0 if nothing differs, 3 otherwise.
    """
    require_names(target=target, draft=draft)
    texts = list(islice(cycle(TEXTS), prompts))

    async def compare(address: str) -> list[Finding]:
        async with AsyncClient(address, timeout=max(600.0, start_timeout_s)) as client:
            found = await _greedy(client, texts, tokens)
            if samples and contexts:
                found += await _samples(client, texts[:contexts], samples, error_rate)
            return found

    flags = ["--redis-url", "none", "--model", target, "--draft-model", draft]
    flags += ["--verifier-flags", shlex.join(["--dtype", dtype, "--device", device])]
    with services_running(flags, start_timeout_s=start_timeout_s) as lines:
        findings = asyncio.run(compare(address_of(lines)))
    if output is OutputFormat.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            verdict = "ok" if not finding.failures else f"{finding.failures} differ"
            print(f"{finding.name}: {finding.number} compared, {verdict}{finding.remark and f' ({finding.remark})'}")
    wrong = [finding for finding in findings if finding.failures]
    if wrong:
        message = f"{wrong[0].name}: {wrong[0].failures} of {wrong[0].number} differ"
        raise ConfigurationError(f"{message}; use --dtype float32, and report it if that does not help", exit_code=3)


async def _greedy(client: AsyncClient, texts: Sequence[str], num_tokens: int) -> list[Finding]:
    """Texts at temperature 0, one by one and in batches, against those of plain decoding one by one."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    async def generate(speculation: str, at_once: int) -> list[GenerationResult]:
        return await client.generate_many(texts, at_once=at_once, sampling=sampling, speculation=speculation)

    plain = await generate(PLAIN, at_once=1)
    return [
        _equality("temperature 0, trees, alone", plain, await generate(TREES, at_once=1)),
        _equality("temperature 0, trees, in a batch", plain, await generate(TREES, at_once=AT_ONCE)),
        _equality("temperature 0, plain, in a batch", plain, await generate(PLAIN, at_once=AT_ONCE)),
    ]


def _equality(name: str, expected: Sequence[GenerationResult], found: Sequence[GenerationResult]) -> Finding:
    different = sum(a.token_ids != b.token_ids for a, b in zip(expected, found, strict=True))
    accepted = sum(result.speculation.num_accepted_draft_tokens for result in found)
    return Finding(name, different, len(found), f"{accepted} draft tokens accepted")


async def _samples(client: AsyncClient, texts: Sequence[str], num: int, error_rate: float) -> list[Finding]:
    """Each of the first tokens of texts that are sampled with trees, with and without seeds, against plain decoding. There is a test for
    each position of each prompt; error_rate is that of all of them together."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def sample(text: str, speculation: str, seed: int | None) -> GenerationResult:
        sampling = SamplingParams(temperature=1.0, max_tokens=COMPARED_TOKENS, seed=seed, ignore_eos=True)
        async with gate:
            return await client.generate(text, sampling=sampling, speculation=speculation)

    async def samples(text: str, speculation: str, seeds: Sequence[int | None]) -> list[GenerationResult]:
        return await asyncio.gather(*(sample(text, speculation, seed) for seed in seeds))

    values: dict[str, list[float]] = {WITHOUT: [], WITH_SEEDS: []}
    accepted: Counter[str] = Counter()
    for text in texts:
        plain = await samples(text, PLAIN, range(0, 2 * num, 2))
        for name, seeds in ((WITHOUT, [None] * num), (WITH_SEEDS, range(1, 2 * num, 2))):
            trees = await samples(text, TREES, seeds)
            accepted[name] += sum(result.speculation.num_accepted_draft_tokens for result in trees)
            values[name] += [
                two_sample_p_value([one.token_ids[at] for one in plain], [one.token_ids[at] for one in trees])
                for at in range(COMPARED_TOKENS)
            ]
    limit = error_rate / sum(map(len, values.values()))
    return [
        Finding(
            name,
            sum(value < limit for value in found),
            len(found),
            f"least p-value {min(found):.2g}, limit {limit:.2g}, {accepted[name]} draft tokens accepted",
        )
        for name, found in values.items()
    ]


def two_sample_p_value(a: Sequence[int], b: Sequence[int]) -> float:
    """p-value of the chi-square test that two samples of tokens have one distribution. Rare tokens are one category."""
    import torch

    counts_a, counts_b = Counter(a), Counter(b)
    both = counts_a + counts_b
    common = [token for token, count in both.items() if count >= LEAST_COUNT]
    pairs = [(counts_a[token], counts_b[token]) for token in common]
    rare = (len(a) - sum(p for p, _ in pairs), len(b) - sum(q for _, q in pairs))
    if sum(rare):
        pairs.append(rare)
    if len(pairs) < 2:
        return 1.0
    ratio = (len(b) / len(a)) ** 0.5
    statistic = sum((p * ratio - q / ratio) ** 2 / (p + q) for p, q in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
