"""Which drafter and verifier are a pair: padded vocabularies fit, another tokenizer does not, and a refusal names both values."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs
from support.services import collect, drafter_of, request, until, verifier_of

from drafter_service.growth_loop import MAX_LOGGED, with_model
from rootward.core.frames import PROTOCOL, Hello
from rootward.engine.tabular import TabularModel
from rootward.ports import ModelInfo

DRAFT = ModelInfo("draft", 1000, 64, tokenizer_hash="a" * 64)


def hello(**fields) -> Hello:
    return Hello(
        **{"worker": "v", "incarnation": 1, "tokenizer_hash": "a" * 64, "vocab_size": 1000, "max_positions": 64}
        | fields
    )


@pytest.mark.parametrize("vocab", [1000, 1024, 960])
def test_one_tokenizer_and_tables_padded_differently_are_a_pair(vocab: int) -> None:
    assert with_model(hello(vocab_size=vocab), DRAFT) == (DRAFT, "")


@pytest.mark.parametrize(
    ("wrong", "field", "both"),
    [
        ({"tokenizer_hash": "b" * 64}, "tokenizer", ("bbbb", "aaaa")),
        ({"tokenizer_hash": "", "vocab_size": 1024}, "vocab_size", ("1024", "1000")),
        ({"protocol": PROTOCOL + 1}, "protocol", (str(PROTOCOL + 1), str(PROTOCOL))),
    ],
)
def test_a_refusal_names_the_field_and_both_values(wrong: dict, field: str, both: tuple[str, str]) -> None:
    _, refusal = with_model(hello(**wrong), DRAFT)
    assert refusal.startswith(f"{field}: ")
    assert all(value in refusal for value in both)


async def test_a_drafter_logs_the_beginning_of_a_long_name_of_a_verifier() -> None:
    drafter = drafter_of(TabularModel(5, seed=0, max_slots=2))
    with capture_logs() as logs:
        drafter._answer(hello(worker="v" * 100_000, tokenizer_hash=""))
    assert [line["verifier"] for line in logs if line["event"] == "pairing_refused"] == ["v" * MAX_LOGGED]


async def test_a_draft_table_with_fewer_rows_drafts_what_it_has() -> None:
    """Padding: the target's table is larger. Tokens beyond the draft's own are never drafted, and cost the tree they appear in."""
    target = TabularModel(7, seed=1, max_slots=2)
    draft = TabularModel(5, seed=1, max_slots=2)
    drafter = drafter_of(draft)
    drafter._agree = lambda hello, info: (info, "")
    async with drafter, verifier_of(target, {"d": drafter}, draft_wait_ms=50) as verifier:
        await until(lambda: verifier.pool.up)
        tokens, last = await collect(verifier, request(temperature=0.0, max_tokens=40))
    text = [1, 2, 3]
    while len(text) < 43:
        text.append(int(target.law(text).argmax()))
    assert tokens == text[3:]
    assert last.finish.stats.num_spec_steps > 0
