"""Values of a generation: requests of token ids and runs of committed token ids.

These types are used by gateway, verifier and drafter and are independent of text, encoding and model. Constructors check ranges and raise
`ValueError("field: value fix")`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from rootward.values import SpeculationStats as SpeculationStats
from rootward.values import TokenLogprob as TokenLogprob

MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD, MAX_BAD_TOKENS = 256, 32
MAX_NAME = 256  # characters of a tenant, a salt, a pool
MAX_FORM = 1 << 18  # characters of a schema, expression or grammar

_SAMPLING_RANGES = (
    ("temperature", 0.0, 100.0, "[0, 100]", "0 decodes greedily"),
    ("top_p", 0.0, 1.0, "(0, 1]", "use 1 to keep every token"),
    ("min_p", 0.0, 1.0, "[0, 1]", "use 0 to keep every token"),
    ("repetition_penalty", 0.0, 100.0, "(0, 100]", "1 is off, more discourages"),
    ("presence_penalty", -2.0, 2.0, "[-2, 2]", "0 is off, more discourages"),
    ("frequency_penalty", -2.0, 2.0, "[-2, 2]", "0 is off, more discourages"),
)
# Divisors of scores: with smaller ones float32 overflows, and the NaN of one request would fail the whole step.
_SMALLEST = (
    ("temperature", 1e-4, "use 0 to decode greedily"),
    ("repetition_penalty", 1e-2, "1 is off, less encourages"),
)


def _require(ok: bool, name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {value!r} {fix}")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """ValueError, naming the field `name`, for an id that is no token of a vocabulary of this size."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        unknown = next(token for token in ids if not 0 <= token < vocab_size)
        fix = f"is no token of a vocabulary of {vocab_size}; send ids from 0 to {vocab_size - 1}"
        raise ValueError(f"{name}: {unknown!r} {fix}")


def _require_text(name: str, value: str) -> None:
    fix = f"is no text of at most {MAX_NAME} characters"
    _require(len(value) <= MAX_NAME and is_text(value), name, value[:32], fix)


class DraftMode(str, Enum):
    """How a drafter makes children (algorithms.md, table 5)."""

    SAMPLED = "sampled"  # drawn without replacement from the declared row: ratio tests
    IID = "iid"  # drawn with replacement, copies kept: ratio tests for copies
    GREEDY = "greedy"  # k-1 chosen + 1 drawn first: ratio tests
    TOP_K = "top_k"  # chosen, most likely first: verified by target matching
    COUPLED = "coupled"  # shared Gumbel noise: verified by target matching

    @property
    def ratio(self) -> bool:
        """Its trees are verified by ratio tests."""
        return self not in (DraftMode.TOP_K, DraftMode.COUPLED)


class Rule(str, Enum):
    """Verification rule."""

    TRAVERSAL = "traversal"
    TOKEN = "token"
    BLOCK = "block"  # of chains
    MULTI_STEP = "multi_step"  # of copies, in random order
    MATCH = "match"  # target's own token per node; the rule of TOP_K and COUPLED trees


MAX_BRANCHING, MAX_COPIES, MAX_LEVELS = 64, 8, 64  # of a draft strategy: children of a node, copies of a node, levels

_STRATEGIES: dict[str, tuple[DraftMode | None, int, int, str]] = {  # mode, least and most numbers, form
    "best_first": (None, 0, 0, "best_first"),
    "chain": (DraftMode.SAMPLED, 1, 1, "chain:K"),
    "iid": (DraftMode.IID, 1, MAX_LEVELS, "iid:B1,B2,..."),
    "rsd_c": (DraftMode.SAMPLED, 1, MAX_LEVELS, "rsd_c:B1,B2,..."),
    "rsd_s": (DraftMode.SAMPLED, 2, 2, "rsd_s:WIDTH,DEPTH"),
    "greedy": (DraftMode.GREEDY, 0, MAX_LEVELS, "greedy or greedy:B1,B2,..."),
    "top_k": (DraftMode.TOP_K, 0, MAX_LEVELS, "top_k or top_k:B1,B2,..."),
    "coupled": (DraftMode.COUPLED, 0, MAX_LEVELS, "coupled or coupled:B1,B2,..."),
    "marginals": (DraftMode.TOP_K, 0, 1, "marginals or marginals:DEPTH"),
}


@dataclass(frozen=True, slots=True)
class DraftStrategy:
    """The shape of a drafter's trees, written `NAME` or `NAME:N1,N2,...` in settings and requests (docs/parameters.md)."""

    name: str = "best_first"
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(
            self.name in _STRATEGIES, "draft_strategy", self.name, f"is unknown; use one of {', '.join(STRATEGIES)}"
        )
        _, least, most, form = _STRATEGIES[self.name]
        _require(least <= len(self.numbers) <= most, "draft_strategy", str(self), f"has another form; write {form}")
        largest = MAX_COPIES if self.name == "iid" else MAX_BRANCHING
        inside = all(1 <= number <= largest for number in self.numbers)
        _require(inside, "draft_strategy", str(self), f"has a number outside [1, {largest}]; write {form}")

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, self.numbers))}" if self.numbers else self.name

    @staticmethod
    def parse(text: str) -> DraftStrategy:
        """Parse a strategy; ValueError with the reason if it is invalid."""
        name, colon, numbers = text[:MAX_NAME].partition(":")
        parts = numbers.split(",") if colon else []
        whole = all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts)
        _require(whole, "draft_strategy", text[:MAX_NAME], "has numbers that are none; write NAME or NAME:N1,N2,...")
        return DraftStrategy(name, tuple(map(int, parts)))

    @property
    def mode(self) -> DraftMode | None:
        """Draft mode of its trees; None: as the verifier requests."""
        return _STRATEGIES[self.name][0]

    def check_mode(self, mode: DraftMode) -> None:
        """ValueError unless it grows trees of this mode. Every strategy does for target matching."""
        own = mode is not DraftMode.IID if self.mode is None else mode is self.mode
        fix = f"grows {'no copies' if self.mode is None else f'{self.mode.value} trees'}, not {mode.value} ones"
        _require(own or not mode.ratio, "draft_strategy", str(self), f"{fix}; leave the law out")


STRATEGIES = tuple(form for _, _, _, form in _STRATEGIES.values())
BEST_FIRST = DraftStrategy()


class SpeculationMode(str, Enum):
    AUTO = "auto"
    DISABLED = "disabled"
    REQUIRED = "required"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Processors of the target's distribution, in the order of docs/parameters.md. The defaults do not change it.

    The repetition penalty looks at prompt and output, the other two penalties at the output. `logit_bias` and
    `allowed_token_ids` are kept sorted; no allowed ids means every token.
    """

    temperature: float = 1.0  # 0 decodes greedily
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, relative to the most likely token
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the output must not have

    def __post_init__(self) -> None:
        for name, low, high, ok, fix in _SAMPLING_RANGES:
            value = getattr(self, name)
            inside = low <= value <= high and (value > low or "[" in ok)
            _require(math.isfinite(value) and inside, name, value, f"is outside {ok}; {fix}")
        for name, least, fix in _SMALLEST:
            value = getattr(self, name)
            _require(value == 0 or value >= least, name, value, f"is below {least}; {fix}")
        _require(0 <= self.top_k < 2**32, "top_k", self.top_k, "is outside [0, 2^32); use 0 to keep every token")
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(self.allowed_token_ids))))
        tokens = [token for token, _ in self.logit_bias]
        twice = next((a for a, b in pairwise(tokens) if a == b), None)
        _require(twice is None, "logit_bias", twice, "has two entries; give one per token")
        _require(len(tokens) <= MAX_BIASES, "logit_bias", len(tokens), f"entries are more than {MAX_BIASES}")
        _require(min(tokens, default=0) >= 0, "logit_bias", min(tokens, default=0), "is no token; ids are not negative")
        odd = next((b for _, b in self.logit_bias if not -100 <= b <= 100), None)
        _require(odd is None, "logit_bias", odd, "is outside [-100, 100]; -100 all but forbids a token")
        least = self.allowed_token_ids[0] if self.allowed_token_ids else 0
        _require(least >= 0, "allowed_token_ids", least, "is no token; ids are not negative")
        bad = self.bad_sequences
        _require(len(bad) <= MAX_BAD, "bad_words", len(bad), f"sequences are more than {MAX_BAD}")
        odd_run = next((run for run in bad if not 1 <= len(run) <= MAX_BAD_TOKENS or min(run) < 0), None)
        _require(odd_run is None, "bad_words", odd_run, f"is not 1 to {MAX_BAD_TOKENS} tokens")
        fix = "sequences cannot be combined with allowed_token_ids; send one of them"
        _require(not (bad and self.allowed_token_ids), "bad_words", len(bad), fix)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def shifted(self) -> bool:
        """Has processors that do not depend on the text: bias or allowed tokens."""
        return bool(self.logit_bias or self.allowed_token_ids)

    @property
    def penalised(self) -> bool:
        """Has processors that depend on the text: penalties."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Form(str, Enum):
    """Kind of a structured output."""

    JSON_OBJECT = "json_object"  # any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure that the whole output must have. `text` is the schema, expression or grammar; "" for JSON_OBJECT."""

    form: Form
    text: str = ""

    def __post_init__(self) -> None:
        free = self.form is Form.JSON_OBJECT
        fix = "takes no text" if free else "is empty; write down the form of the output"
        _require(bool(self.text.strip()) is not free, self.form.value, self.text[:32], fix)
        _require(is_text(self.text), self.form.value, "", "has a lone surrogate, which is no text; leave it out")
        _require(len(self.text) <= MAX_FORM, self.form.value, len(self.text), f"characters are more than {MAX_FORM}")


@dataclass(frozen=True, slots=True)
class Stopping:
    """Token-level stop conditions. `eos_ids` are the model's; stop strings are handled by the gateway."""

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # tokens that end a generation have no probability before this many

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "is below 1; ask for at least one token")
        fix = f"is outside [0, max_tokens]; max_tokens is {self.max_tokens}"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, fix)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation parameters of a request. None = the server's policy."""

    mode: SpeculationMode = SpeculationMode.AUTO
    rule: Rule | None = None
    law: DraftMode | None = None
    num_draft_tokens: int | None = None
    max_depth: int | None = None
    topk: int | None = None
    drafter: str = ""  # who grows its trees: a pool of drafters, or what the verifier looks up itself; "": the policy
    strategy: DraftStrategy | None = None  # None: what the drafters were started with

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "max_depth", "topk"):
            value = getattr(self, name)
            _require(value is None or 1 <= value <= 1024, name, value, "is outside [1, 1024]")
        n, d = self.num_draft_tokens, self.max_depth
        _require(n is None or d is None or d <= n, "max_depth", d, f"is larger than num_draft_tokens {n}")
        _require_text("drafter", self.drafter)
        if self.strategy is not None and self.law is not None:
            self.strategy.check_mode(self.law)
        matched = self.law is not None and not self.law.ratio
        fix = "needs rule 'match': the target's own tokens decide on such trees"
        _require(not matched or self.rule in (None, Rule.MATCH), "law", self.law, fix)


@dataclass(frozen=True, slots=True)
class VerifierRequest:
    """One attempt at a generation. `committed` is not empty when a lost attempt is resumed; offsets count from the prompt's end."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    speculation: Speculation = field(default_factory=Speculation)
    committed: tuple[int, ...] = ()
    epoch: int = 1
    seed: int = 0  # always set: the gateway draws one when the client gives none
    choice: int = 0
    deadline_s: float | None = None  # seconds from now; None = no deadline
    structure: Structure | None = None
    logprobs: int | None = None  # None = none; k = of the emitted token and of the k most likely ones
    priority: int = 0  # lower runs earlier
    tenant: str = ""  # who asks: tenants share places fairly and never each other's cached prefixes
    prediction: tuple[int, ...] = ()  # the output that the client expects, from its beginning: a source of drafts
    trees: bool = False  # tell the tree of every round with what it committed
    prompt_logprobs: int | None = None  # as `logprobs`, of every prompt token but the first
    cache_salt: str = ""  # texts with different salts never share cached prefixes
    traceparent: str = ""  # W3C trace context of the caller; "": none

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            _require(k is None or 0 <= k <= MAX_LOGPROBS, name, k, f"is outside [0, {MAX_LOGPROBS}]")
        excluded = {  # they could leave no allowed token, with a complete or an incomplete structure
            "ignore_eos": self.stopping.ignore_eos,
            "min_tokens": self.stopping.min_tokens > 0,
            "allowed_token_ids": self.sampling.allowed_token_ids,
            "bad_words": self.sampling.bad_sequences,
        }
        clash = next((name for name, given in excluded.items() if given), "")
        fix = f"cannot be combined with {clash}, because the output ends where its form is complete; send one of them"
        form = self.structure.form.value if self.structure is not None else ""
        _require(not (form and clash), "structured_output", form, fix)
        _require(len(self.prompt) > 0, "prompt", "", "is empty; give at least one token")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "is outside [0, 2^64)")
        _require(self.epoch >= 1, "epoch", self.epoch, "is below 1")
        _require(-(2**31) <= self.priority < 2**31, "priority", self.priority, "is outside [-2^31, 2^31)")
        _require_text("tenant", self.tenant)
        _require_text("cache_salt", self.cache_salt)

    def check_tokens(self, vocab_size: int, eos_ids: Collection[int]) -> None:
        """ValueError unless every id is a token of the model and some token is always allowed. eos_ids: those of the model."""
        sampling, stopping = self.sampling, self.stopping
        num_stops = len(stopping.stop_token_ids)
        _require(num_stops <= MAX_STOP_IDS, "stop_token_ids", num_stops, f"ids are more than {MAX_STOP_IDS}")
        for name, ids in (
            ("prompt", (*self.prompt, *self.committed)),
            ("prediction", self.prediction),
            ("stop_token_ids", stopping.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", tuple(token for run in sampling.bad_sequences for token in run)),
        ):
            check_ids(name, ids, vocab_size)
        stops = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else eos_ids)}
        last = {run[-1] for run in sampling.bad_sequences}
        _require(not last or len(last | stops) < vocab_size, "bad_words", len(last), "leave no token")
        allowed = set(sampling.allowed_token_ids)
        ends_only = allowed <= stops if allowed else len(stops) >= vocab_size
        fix = "leaves no token, for all allowed ones end the text"
        _require(not (stopping.min_tokens and ends_only), "min_tokens", stopping.min_tokens, fix)


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None  # the eos or stop token that ended it
    stats: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The tree of a round, for display. Node i ≥ 1 has tokens[i - 1] and parents[i - 1]; node 0 is the last committed token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]  # nodes that were accepted, from the root on

    def __post_init__(self) -> None:
        n = len(self.tokens)
        ordered = len(self.parents) == n and all(0 <= parent <= i for i, parent in enumerate(self.parents))
        _require(ordered, "tree.parents", len(self.parents), f"is no tree of {n} nodes")
        steps = zip((0, *self.path), self.path, strict=False)
        walk = all(1 <= node <= n and self.parents[node - 1] == above for above, node in steps)
        _require(walk, "tree.path", self.path[:8], "is no path from the root")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Results of the prefill."""

    num_cached: int = 0  # prompt tokens whose KV was there already
    logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens 1, 2, …, where they are asked for


@dataclass(frozen=True, slots=True)
class Committed:
    """A run of tokens that became final. `accepted[i]` is True for an accepted draft token, False for a bonus token."""

    epoch: int
    offset: int  # output position of tokens[0]; the prompt does not count
    tokens: tuple[int, ...]
    accepted: tuple[bool, ...]
    finish: Finish | None = None  # on the last message only
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if asked for, else none
    tree: VerifiedTree | None = None  # of the round, if asked for and it had one
    prefilled: Prefilled | None = None  # on the first message of an attempt
