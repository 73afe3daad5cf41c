"""Hypothesis strategies for every value that crosses the wire."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from rootward.core.frames import (
    Close,
    Commit,
    DraftHead,
    Features,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Launch,
    Load,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    ToDrafter,
)
from rootward.core.requests import (
    Committed,
    DraftMode,
    Finish,
    FinishReason,
    Form,
    Rule,
    Sampling,
    Speculation,
    SpeculationMode,
    SpeculationStats,
    Stopping,
    Structure,
    TokenLogprob,
    VerifierRequest,
)
from rootward.ports import DrafterInfo, ModelInfo, VerifierInfo

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=8)
tokens = st.lists(u32, max_size=12).map(tuple)
small = st.integers(0, 500)
f32 = st.floats(width=32, allow_nan=False)


def few(strategy, max_size=3):
    return st.lists(strategy, max_size=max_size).map(tuple)


positive = st.floats(0, 1, exclude_min=True, allow_subnormal=False)
sampling = st.builds(
    Sampling,
    st.just(0.0) | st.floats(1e-4, 100),
    top_k=u32,
    top_p=positive,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(u32, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
    allowed_token_ids=tokens,
) | st.builds(Sampling, bad_sequences=few(st.lists(u32, min_size=1, max_size=4).map(tuple)))
structures = st.none() | st.builds(
    lambda form, text: Structure(form, "" if form is Form.JSON_OBJECT else f"{text}x"), st.sampled_from(Form), text
)
laws = st.sampled_from(DraftMode)
hello = st.builds(Hello, text, u64, text, u32, u32, u32, text)
ack = st.builds(
    HelloAck,
    text,
    u64,
    text,
    u32,
    u32,
    few(laws),
    u32,
    u32,
    text,
    u32,
    head=st.none() | st.builds(DraftHead, text, u32, st.booleans()),
)
features = st.builds(
    lambda num_rows, size, number, int8: Features(np.full((num_rows, size), number, np.float32), int8),
    st.integers(1, 4),
    st.integers(1, 5),
    st.floats(-1e6, 1e6, width=32),
    st.booleans(),
)
load = st.builds(Load, u32, u32, u64, u64, st.booleans(), st.none() | u32)
opens = st.builds(
    Open,
    u32,
    u32,
    tokens,
    sampling,
    laws,
    u64,
    u32,
    u32,
    u32,
    u32,
    u32,
    tokens,
    u32,
    tokens,
    u32,
    text,
    u64,
    st.none() | u32,
    cache_salt=u64,
    num_features=u32,
)
commits = st.builds(
    lambda slot, base, run, hash_, once, budget, features: Commit(
        slot, base, run, hash_, () if once else (1,) * len(run), budget, features
    ),
    u32,
    u32,
    tokens,
    u64,
    st.booleans(),
    st.none() | u32,
    st.none() | features,
)
to_drafter = st.builds(
    ToDrafter,
    st.none() | hello,
    few(opens),
    few(commits),
    few(st.builds(Close, u32, text)),
    few(st.builds(OpenFeatures, u32, u32, features)),
    few(st.builds(Launch, u32, u32, u64)),
)


@st.composite
def rows(draw):
    result = {}
    for node in draw(st.lists(u32, max_size=4, unique=True)):
        size = draw(st.integers(0, 5))
        column = st.lists(draw(st.sampled_from([small, st.integers(1, 65535), u32])), min_size=size, max_size=size)
        result[node] = (np.array(draw(column), dtype=np.int64), np.array(draw(column), dtype=np.int64))
    return result


@st.composite
def grows(draw):
    n = draw(st.integers(0, 20))
    values = draw(st.sampled_from([small, u32]))
    column = st.lists(values, min_size=n, max_size=n)
    return Grow(
        slot=draw(u32),
        base_len=draw(u32),
        base_hash=draw(u64),
        first_node=draw(u32),
        parent=np.array(draw(column), dtype=np.int64),
        token=np.array(draw(column), dtype=np.int64),
        sampled=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_),
        rows=draw(rows()),
        at_rest=draw(st.booleans()),
        draft_us=draw(u64),
        queue_us=draw(u64),
        guess=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=np.bool_),
    )


from_drafter = st.builds(
    FromDrafter,
    st.none() | ack,
    few(grows()),
    few(st.builds(NeedSync, u32, u32, u64)),
    few(st.builds(Reject, u32, text, u32)),
    st.none() | load,
)

ratio_or_match = st.sampled_from(
    [(None, None), (Rule.TRAVERSAL, DraftMode.SAMPLED), (Rule.MATCH, DraftMode.COUPLED), (None, DraftMode.TOP_K)]
)
speculation = st.builds(
    lambda mode, pair, nodes, depth, topk: Speculation(
        mode, pair[0], pair[1], nodes, depth and min(depth, nodes or depth), topk
    ),
    st.sampled_from(SpeculationMode),
    ratio_or_match,
    st.none() | st.integers(1, 1024),
    st.none() | st.integers(1, 1024),
    st.none() | st.integers(1, 1024),
)
request = st.builds(
    VerifierRequest,
    text,
    st.lists(u32, min_size=1, max_size=12).map(tuple),
    sampling,
    st.integers(1, 2**32 - 1).flatmap(
        lambda most: st.builds(Stopping, st.just(most), tokens, st.booleans(), st.integers(0, most))
    ),
    speculation,
    tokens,
    st.integers(1, 2**32 - 1),
    u64,
    u32,
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.just(None),
    st.none() | st.integers(0, 20),
    st.integers(-(2**31), 2**31 - 1),
    text,
    tokens,
)
requests = st.one_of(
    request,
    st.builds(
        lambda wanted, structure: replace(
            wanted,
            structure=structure,
            stopping=replace(wanted.stopping, ignore_eos=False, min_tokens=0),
            sampling=replace(wanted.sampling, allowed_token_ids=(), bad_sequences=()),
        ),
        request,
        structures,
    ),
)
stats = st.builds(SpeculationStats, u32, u32, u32, u32, tokens, u32, text, text, u64)
finish = st.builds(Finish, st.sampled_from(FinishReason), st.none() | u32, stats)


@st.composite
def committed(draw):
    run = draw(tokens)
    flags = tuple(draw(st.lists(st.booleans(), min_size=len(run), max_size=len(run))))
    k = draw(st.integers(0, 3))
    pairs = st.lists(st.tuples(u32, f32), min_size=k, max_size=k).map(tuple)
    logprobs = draw(st.lists(st.builds(TokenLogprob, f32, pairs), min_size=len(run), max_size=len(run)).map(tuple))
    return Committed(draw(u32), draw(u32), run, flags, draw(st.none() | finish), draw(st.sampled_from([(), logprobs])))


model = st.builds(ModelInfo, text, u32, u32, tokens, text, u64, st.booleans(), text)
verifier_info = st.builds(
    VerifierInfo,
    model,
    text,
    u64,
    few(text),
    u32,
    u32,
    u32,
    st.booleans(),
    st.dictionaries(text, st.floats(allow_nan=False), max_size=3),
)
drafter_info = st.builds(DrafterInfo, model, ack, load)

anything = st.one_of(to_drafter, from_drafter, requests, committed(), verifier_info, drafter_info, model)
