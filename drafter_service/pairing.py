"""May this verifier and this drafter work together, and as what does the drafter present itself?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rootward.core.frames import PROTOCOL, Hello
from rootward.ports import ModelInfo

Terms = tuple[ModelInfo, str]  # how the drafter presents itself; why they cannot work together ("" if they can)
Agree = Callable[[Hello, ModelInfo], Terms]


def with_model(hello: Hello, info: ModelInfo) -> Terms:
    """A draft model has a vocabulary and a tokenizer of its own, which must be the target's."""
    if refusal := _protocol(hello):
        return info, refusal
    if hello.tokenizer_hash and info.tokenizer_hash and hello.tokenizer_hash != info.tokenizer_hash:
        refusal = (
            f"tokenizer: target has {hello.tokenizer_hash[:12]}, draft {info.tokenizer_hash[:12]}; "
            "use a draft model with the target's tokenizer (`rootward check-pair` shows the first differing token)"
        )
    elif not hello.tokenizer_hash and hello.vocab_size != info.vocab_size:
        refusal = f"vocab_size: target has {hello.vocab_size}, draft {info.vocab_size}; use models of one vocabulary"
    return info, refusal


def without_model(hello: Hello, info: ModelInfo) -> Terms:
    """A drafter that looks things up speaks the verifier's vocabulary; `info.vocab_size`: ids it may make up."""
    if refusal := _protocol(hello):
        return info, refusal
    if info.vocab_size > hello.vocab_size:
        refusal = f"vocab_size: target has {hello.vocab_size}, {info.name} proposes {info.vocab_size}; give it no more"
    as_target = replace(
        info,
        vocab_size=hello.vocab_size,
        max_positions=min(hello.max_positions, info.max_positions),
        tokenizer_hash=hello.tokenizer_hash,
    )
    return as_target, refusal


def _protocol(hello: Hello) -> str:
    if hello.protocol == PROTOCOL:
        return ""
    return f"protocol: verifier speaks {hello.protocol}, drafter {PROTOCOL}; run the same release on both sides"
