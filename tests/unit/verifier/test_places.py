"""Who holds KV and who waits: nobody overtakes, the preempted come back first with their round as it was, nothing is held for the dead."""

from __future__ import annotations

from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.lookup import Successors, parse_recipe
from rootward.core.requests import DraftMode, Rule, Stopping, VerifierRequest
from verifier_service.kv_admission import Slots
from verifier_service.local_drafts import LocalDraft
from verifier_service.session import Draft, Session


class CountedSlots:
    """A model that counts its slots, and a memory that counts what it has let in: `room` is set by the test."""

    def __init__(self) -> None:
        self.open_slots: set[int] = set()
        self.room = 2
        self.num_blocks = self.num_free_blocks = self.num_free_slots = 4
        self.known = 0
        self.evicted_age_s = float("inf")

    def open(self, tokens, *, salt: str) -> int:
        slot = min(set(range(9)) - self.open_slots)
        self.open_slots.add(slot)
        return slot

    def close(self, slot: int) -> None:
        self.open_slots.remove(slot)

    def length(self, slot: int) -> int:
        return self.known

    def admits(self, session: Session, running) -> bool:
        return len(session.tokens) + sum(len(s.tokens) for s in running) <= 10 * self.room


def session(number: int, prompt: int = 3) -> Session:
    wanted = VerifierRequest(f"r{number}", (1,) * prompt, stopping=Stopping(9))
    return Session(number, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())


def lost(one: Session, error: Exception) -> None:
    raise error


def places() -> tuple[Slots, CountedSlots]:
    slots = CountedSlots()
    here = Slots(slots, 8)  # type: ignore[arg-type]  # all that is asked of it
    here.admits = lambda session: slots.admits(session, here.running.values())  # type: ignore[method-assign]
    return here, slots


def test_slots_are_given_in_order_and_none_overtakes_one_that_does_not_fit() -> None:
    here, slots = places()
    first, large, small = session(1), session(2, prompt=18), session(3)
    for one in (first, large, small):
        here.waiting.push(one)
    assert here.admit(lost) == [first]
    assert (len(here.waiting), len(slots.open_slots)) == (2, 1)
    first.end()
    assert here.release_done() == [first]
    assert here.admit(lost) == [large]
    slots.room = 3
    assert here.admit(lost) == [small]


def test_a_preempted_session_keeps_its_round_its_cap_and_its_tree() -> None:
    """Decision 0005: whether a tree still waits depends on its values; memory must not change what is verified."""
    here, slots = places()
    one, two, three = (session(n, prompt=10) for n in (1, 2, 3))
    for some in (one, two, three):
        here.waiting.push(some)
    here.admit(lost)
    two.fed, two.round.max_nodes = 2, 7
    draft = two.draft = Draft(None, 1, LivingTree(10, 0, vocab_size=5))
    here.preempt([2])
    assert list(here.running) == [1]
    assert slots.open_slots == {0}
    assert (two.kv_slot, two.fed, two.prefill_left) == (None, 0, 9)
    assert (two.round.max_nodes, two.draft) == (7, draft)
    assert here.gauges()["num_preemptions_total"] == 1
    slots.known = 8
    assert here.admit(lost) == [two]
    assert (two.prefill_left, two.round.max_nodes, two.draft) == (1, 7, draft)
    assert here.gauges()["prefix_cache_hits_total"] == 8


def test_a_preempted_session_comes_back_without_what_was_looked_up() -> None:
    """It may be launched by the step that ends its prefill, where no rows are kept for it; and it is a function of the text alone."""
    here, _ = places()
    one = session(1)
    one.local = LocalDraft(
        "ngram",
        parse_recipe("ngram:").source(DraftMode.SAMPLED, Successors()),
        one.statistics,
        cap=4,
        tree=Snapshot.__new__(Snapshot),
    )
    here.waiting.push(one)
    here.admit(lost)
    here.preempt([1])
    assert one.local.num_nodes == 0


def test_one_that_ends_while_it_is_away_is_handed_out_for_its_tree_to_be_closed() -> None:
    here, slots = places()
    one = session(1)
    here.waiting.push(one)
    here.admit(lost)
    here.preempt([1])
    one.end()
    assert here.release_done() == [one]
    assert here.release_done() == here.admit(lost) == []
    assert not slots.open_slots


def test_a_session_that_the_model_refuses_fails_no_other() -> None:
    here, slots = places()
    bad, good = session(1), session(2)
    plain_open = slots.open

    def open_(tokens, *, salt: str) -> int:
        if not bad.done:
            raise RuntimeError("not this one")
        return plain_open(tokens, salt=salt)

    slots.open = open_  # type: ignore[method-assign]
    here.waiting.push(bad)
    here.waiting.push(good)

    def failed(one: Session, error: Exception) -> None:
        one.end()

    assert here.admit(failed) == [good]
    assert bad.done
    assert bad.kv_slot is None


def test_one_whom_the_model_will_not_take_back_is_handed_out_for_its_tree_to_be_closed() -> None:
    here, slots = places()
    one = session(1)
    here.waiting.push(one)
    here.admit(lost)
    here.preempt([1])

    def open_(tokens, *, salt: str) -> int:
        raise RuntimeError("no more")

    slots.open = open_  # type: ignore[method-assign]

    def failed(one: Session, error: Exception) -> None:
        one.end()

    assert here.admit(failed) == []
    assert here.release_done() == [one]
    assert here.release_done() == []
