"""A `ports.Verifier` that spells a fixed continuation, so that a lost, repeated or reordered token is seen at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from unit.gateway.tokenizers_for_tests import byte_level

from rootward.core.requests import (
    Committed,
    Finish,
    FinishReason,
    Prefilled,
    SpeculationStats,
    TokenLogprob,
    VerifierRequest,
)
from rootward.errors import StaleEpoch, Unavailable
from rootward.ports import ModelInfo, VerifierInfo

END_ID = next(iter(byte_level().special_ids))
MODEL = ModelInfo("tiny", vocab_size=330, max_positions=256, eos_ids=(END_ID,), fingerprint="f" * 16)


@dataclass
class SpellingVerifier:
    """Continues every prompt with `text` and the end token; `run` tokens per message, the last of each a bonus token.

    `die_after(request)` says after how many tokens of this attempt the stream breaks (None = never).
    """

    text: str = "def f(x): return x + 1"
    run: int = 3
    delay_s: float = 0.0
    up: bool = True
    die_after: Callable[[VerifierRequest], int | None] = lambda request: None
    spoil: Callable[[Committed], list[Committed]] = lambda run: [run]
    model: ModelInfo = MODEL
    max_sessions: int = 4
    draining: bool = False
    requests: list[VerifierRequest] = field(default_factory=list)
    running: int = 0
    epochs: dict[str, int] = field(default_factory=dict)

    async def get_info(self) -> VerifierInfo:
        if not self.up:
            raise Unavailable("down")
        return VerifierInfo(
            self.model, "tiny-1", 7, ("draft-1",), self.running, 0, self.max_sessions, self.draining, {}
        )

    async def generate(self, request: VerifierRequest) -> AsyncIterator[Committed]:
        self.requests.append(request)
        if not self.up:
            raise Unavailable("failed to connect to all addresses")
        if request.epoch < self.epochs.get(request.request_id, 0):
            raise StaleEpoch("old", metadata={"epoch": str(self.epochs[request.request_id])})
        self.epochs[request.request_id] = request.epoch
        self.running += 1
        try:
            async for run in self._runs(request):
                for message in self.spoil(run):
                    yield message
        finally:
            self.running -= 1

    async def _runs(self, request: VerifierRequest) -> AsyncIterator[Committed]:
        whole = [*byte_level().encode(self.text), END_ID][: request.stopping.max_tokens]
        ended = whole[-1] in ((END_ID,) if not request.stopping.ignore_eos else ()) + request.stopping.stop_token_ids
        at = len(request.committed)
        assert tuple(whole[:at]) == request.committed
        left = self.die_after(request)
        while at < len(whole):
            await asyncio.sleep(self.delay_s)
            tokens = tuple(whole[at : at + self.run])
            if left is not None and left < len(tokens):
                self.up = False
                raise Unavailable("killed")
            left = None if left is None else left - len(tokens)
            last = at + len(tokens) == len(whole)
            finish = self._finish(request, tokens[-1] if ended else None) if last else None
            accepted = tuple(i < len(tokens) - 1 for i in range(len(tokens)))
            logprobs = tuple(logprob_of(at + i, t, request.logprobs) for i, t in enumerate(tokens))
            asked = request.logprobs is not None
            told = Prefilled(2, prompt_logprobs(request)) if at == len(request.committed) else None
            yield Committed(request.epoch, at, tokens, accepted, finish, logprobs if asked else (), prefilled=told)
            at += len(tokens)

    def _finish(self, request: VerifierRequest, stop_id: int | None) -> Finish:
        stats = SpeculationStats(2, 1, 10, 5, (1, 0, 1), 0, "draft-1", "traversal", request.seed)
        return Finish(FinishReason.LENGTH if stop_id is None else FinishReason.STOP, stop_id, stats)


def logprob_of(position: int, token: int, num_top: int | None) -> TokenLogprob:
    """Made up, but a function of the output position. Token 100 is the likeliest, then the one that is spelled."""
    own = -0.5 * (position + 1)
    return TokenLogprob(own, ((100, -0.25), (token, own), (101, -99.0))[: num_top or 0])


def prompt_logprobs(request: VerifierRequest) -> tuple[TokenLogprob, ...]:
    if request.prompt_logprobs is None:
        return ()
    return tuple(logprob_of(100 + i, t, request.prompt_logprobs) for i, t in enumerate(request.prompt[1:]))


def older_epoch(run: Committed) -> Committed:
    return replace(run, epoch=run.epoch - 1, tokens=(1,) * len(run.tokens), finish=None)
