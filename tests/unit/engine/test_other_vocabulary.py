"""A draft model in the vocabulary of a target with another tokenizer."""

from __future__ import annotations

import asyncio
from itertools import chain

import numpy as np
import pytest
import torch
from support.services import collect, in_process, request, until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from unit.engine.networks import SHAPE

from benchmarks.results import p_value
from drafter_service.__main__ import build_lookup, load, recipe_of
from drafter_service.settings import DrafterSettings
from rootward.core.requests import DraftMode, Rule
from rootward.engine.other_vocabulary import TokenMap, TranslatedModel, in_vocabulary_of, token_map
from rootward.engine.tabular import TabularModel
from rootward.engine.tokenizers import content_hash, token_texts
from rootward.errors import ConfigurationError
from rootward.ports import COMMITTED, Rows

# target 0 a, 1 b, 2 c, 3 ab, 4 ac; draft 0 c, 1 ab, 2 a, 3 b, 4 cc
TARGET = {0: b"a", 1: b"b", 2: b"c", 3: b"ab", 4: b"ac"}
DRAFT = {0: b"c", 1: b"ab", 2: b"a", 3: b"b", 4: b"cc"}
SHARED = {0: 2, 1: 3, 2: 0, 3: 1}


@pytest.fixture
def tokens() -> TokenMap:
    return TokenMap(TARGET, DRAFT)


def translated(tokens: TokenMap, **draft) -> tuple[TranslatedModel, TabularModel]:
    table = TabularModel(5, seed=3, order=3, **({"max_slots": 2} | draft))
    return TranslatedModel(table, tokens, vocab_size=5), table


def expected(table: TabularModel, tokens: TokenMap, text: list[int]) -> np.ndarray:
    """Probabilities in target ids after a text in target ids."""
    law = table.law(list(chain.from_iterable(map(tokens.spelled, text))))
    found = np.zeros(5)
    for target_id, draft_id in SHARED.items():
        found[target_id] = law[draft_id]
    return found / found.sum()


def test_shared_tokens_and_the_spelling_of_others(tokens) -> None:
    assert dict(zip(tokens.target_ids.tolist(), tokens.draft_ids.tolist(), strict=True)) == SHARED
    assert tokens.spelled(3) == (1,)
    assert tokens.spelled(4) == (2, 0)  # ac = a + c


def test_tokens_of_one_text_are_shared_once() -> None:
    tokens = TokenMap({0: b"x", 1: b"x", 2: b"y"}, {0: b"y", 1: b"x", 2: b"x", 3: b"end"}, pairs=[(5, 3)])
    assert tokens.target_ids.tolist() == [0, 2, 5]
    assert tokens.draft_ids.tolist() == [1, 0, 3]
    assert tokens.spelled(1) == (1,)  # read, though never drafted


def test_vocabularies_without_a_common_token_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="target_tokenizer"):
        TokenMap({0: b"x"}, {0: b"y"})


def test_rows_are_those_of_the_draft_on_the_same_text(tokens) -> None:
    model, table = translated(tokens)
    slot = model.open()
    text = [0, 4, 3]  # with a token that the draft spells by two
    probabilities = model.forward([Rows.chain(slot, 100, text)]).softmax(-1).numpy()
    for n in range(len(text)):
        np.testing.assert_allclose(probabilities[n], expected(table, tokens, text[: n + 1]), atol=1e-12)
    model.commit(slot, 102, keep_below=False)
    assert model.length(slot) == 3
    nodes = Rows(slot, *np.array([[1, 2, 3], [COMMITTED, COMMITTED, 1], [2, 4, 1]]))
    both = [text + path for path in ([2], [4], [2, 1])]
    probabilities = model.forward([nodes], num_logits=[2]).softmax(-1).numpy()
    for row, path in zip(probabilities, both[1:], strict=True):
        np.testing.assert_allclose(row, expected(table, tokens, path), atol=1e-12)
    model.release(slot, keep=[1, 3])
    model.commit(slot, 1, keep_below=True)
    below = Rows(slot, *np.array([[7], [3], [0]]))
    (row,) = model.forward([below]).softmax(-1).numpy()
    np.testing.assert_allclose(row, expected(table, tokens, [*text, 2, 1, 0]), atol=1e-12)
    model.close(slot)
    table.check_idle()
    assert model.num_free_slots == 2


def test_a_known_text_is_read_from_where_it_is_not_held(tokens) -> None:
    model, table = translated(tokens)
    text = [0, *[4] * 12, 1]  # 26 draft tokens; 16 of them fill a block, which ends inside a token
    slot = model.open(text)
    model.forward([Rows.chain(slot, 100, text)], num_logits=[1])
    model.commit(slot, 100 + len(text) - 1, keep_below=False)
    model.close(slot)
    slot = model.open(text)
    held = model.length(slot)
    assert held == 8  # a, and seven times ac: 15 of the 16 tokens of the block
    (row,) = model.forward([Rows.chain(slot, 100, text[held:])], num_logits=[1]).softmax(-1).numpy()
    np.testing.assert_allclose(row, expected(table, tokens, text), atol=1e-12)
    model.commit(slot, 100 + len(text) - held - 1, keep_below=False)
    assert model.length(slot) == len(text)


def test_a_text_too_long_for_the_draft_gets_uniform_rows_and_costs_no_other_slot(tokens) -> None:
    model, table = translated(tokens, max_positions=8)
    full, other = model.open(), model.open()
    text = [4] * 5  # ten draft tokens
    rows = model.forward([Rows.chain(full, 100, text), Rows.chain(other, 100, [0, 1])], num_logits=[1, 1]).softmax(-1)
    np.testing.assert_allclose(rows[0].numpy(), [0.25, 0.25, 0.25, 0.25, 0])
    np.testing.assert_allclose(rows[1].numpy(), expected(table, tokens, [0, 1]), atol=1e-12)
    model.commit(full, 104, keep_below=False)
    assert model.length(full) == 5
    (row,) = model.forward([Rows.chain(full, 200, [1])])
    assert torch.isfinite(row).tolist() == [True] * 4 + [False]
    model.release(full)
    model.close(full)
    model.close(other)
    table.check_idle()


async def test_texts_have_the_target_s_law(tokens) -> None:
    target = TabularModel(5, seed=1, sharpness=0.4, max_slots=32)
    model, table = translated(tokens, max_slots=32)
    async with in_process(target, model, num_draft_tokens=6, topk=3) as system:
        wanted = [
            request(f"r{i}", max_tokens=400, seed=i, rule=Rule.TRAVERSAL, law=DraftMode.SAMPLED) for i in range(32)
        ]
        results = await asyncio.gather(*(collect(system.verifier, one) for one in wanted))
        await until(lambda: not system.drafter.grower.trees and table.num_free_slots == 32)
        table.check_idle()
    assert sum(last.finish.stats.num_accepted_draft_tokens for _, last in results) > 1000
    assert p_value(target, [[1, 2, 3, *text] for text, _ in results]) > 1e-4


def trained(kind: str, words: list[str]):
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        letters = [*pre_tokenizers.ByteLevel.alphabet(), *words]
        backend = Tokenizer(models.BPE({word: i for i, word in enumerate(sorted(letters))}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        backend = Tokenizer(models.BPE({word: i for i, word in enumerate(pieces)}, [], unk_token="<unk>"))
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<end>" if kind == "bytes" else "</s>"})
    return tokenizer


def test_byte_level_and_sentencepiece_vocabularies_meet_in_their_texts() -> None:
    a, b = (
        trained("bytes", ["\u0120the", "\u00c3\u00a9", "\u0120house"]),
        trained("pieces", ["\u2581the", "\u00e9", "\u2581ho", "use"]),
    )
    texts = token_texts(a)
    assert texts[a.convert_tokens_to_ids("\u0120the")] == b" the"
    assert texts[a.convert_tokens_to_ids("\u00c3\u00a9")] == "\u00e9".encode()
    tokens = token_map(a, b)
    shared = dict(zip(tokens.target_ids.tolist(), tokens.draft_ids.tolist(), strict=True))
    assert shared[a.convert_tokens_to_ids("\u0120the")] == b.convert_tokens_to_ids("\u2581the")
    assert shared[a.convert_tokens_to_ids("\u00c3\u00a9")] == b.convert_tokens_to_ids("\u00e9")
    assert shared[a.eos_token_id] == b.eos_token_id
    assert len(shared) == 256 + 3  # all bytes, two words, the end
    spelled = tokens.spelled(a.convert_tokens_to_ids("\u0120house"))
    assert b.convert_ids_to_tokens(list(spelled)) == ["\u2581ho", "use"]


def test_the_same_tokenizer_needs_no_map() -> None:
    tokenizer = trained("bytes", [])
    table = TabularModel(5)
    assert in_vocabulary_of(table, tokenizer, tokenizer) is table
    other = in_vocabulary_of(table, trained("pieces", []), tokenizer)
    assert other.info.vocab_size == 257
    assert other.info.tokenizer_hash


def test_tokens_of_the_drafts_tokenizer_that_its_model_lacks_are_not_shared() -> None:
    """A tokenizer may have been given tokens for which nobody has made the embedding larger."""
    target, draft = trained("bytes", ["\u0120the"]), trained("pieces", ["\u2581the"])
    the, end = target.convert_tokens_to_ids("\u0120the"), draft.eos_token_id
    assert draft.convert_tokens_to_ids("\u2581the") == end - 1 == 257
    model = in_vocabulary_of(TabularModel(257, seed=1), draft, target)
    slot = model.open([the, target.eos_token_id])
    row = model.forward([Rows.chain(slot, 0, [the, target.eos_token_id])], num_logits=[1])[0]
    assert row[the] == row[target.eos_token_id] == -torch.inf
    assert torch.isfinite(row).sum() == 256


async def test_a_drafter_takes_the_tokenizer_of_the_target(tmp_path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    target, draft = trained("bytes", ["\u0120the"]), trained("pieces", ["\u2581the"])
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": len(draft)})).save_pretrained(tmp_path / "draft")
    settings = {"model": str(tmp_path / "draft"), "max_num_seqs": 2, "num_threads": 1}
    own = await load(DrafterSettings(**settings))
    model = await load(DrafterSettings(**settings, target_tokenizer=str(tmp_path / "target")))
    assert (own.info.tokenizer_hash, own.info.vocab_size) == (content_hash(draft), len(draft))
    assert (model.info.tokenizer_hash, model.info.vocab_size) == (content_hash(target), len(target))
    slot, text = model.open(), [*target.encode("the"), target.convert_tokens_to_ids("\u0120the")]
    row = model.forward([Rows.chain(slot, 1, text)], num_logits=[1])[0]
    assert torch.isfinite(row[target.convert_tokens_to_ids("\u0120the")])


def test_a_drafter_without_a_model_needs_no_tokenizer() -> None:
    settings = DrafterSettings(model="ngram:", target_tokenizer="somewhere")
    with pytest.raises(ConfigurationError, match="target_tokenizer"):
        build_lookup(recipe_of("ngram:"), settings)
