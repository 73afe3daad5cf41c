"""How many draft nodes a round verifies: the speculation controller.

A round that verifies n nodes commits E(n) tokens, and the engine spends step_time(rows) + draft_wait(n) on it. The controller chooses the
sizes that maximise

    goodput = sum of E over the sessions of the batch / (step_time(rows of all sessions) + draft_wait)

so a row goes to the node with the largest expected gain over all sessions as long as that gain exceeds the price of a row. This is the
selection of TETRIS (arXiv:2502.15197) in a lossless form: the gain of a node is known by its number in draw order, before it is drawn.

The three terms are learned per kind of round (draft source, pool, temperature, ...), step_time for all kinds together. Decisions look at
past rounds, clocks and load only, never at a tree that has arrived, and hold for a whole round (algorithms.md 6, docs/decisions/0005).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from verifier_service.step_time import SIZES, Mean, StepTime

ENTER = 1.06  # goodput over that of plain decoding at which speculation begins: estimates err by a few percent
LEAVE = 1.01  # and below which it ends
PROBE_EVERY = 64  # steps between two that try another size; fewer at first
# Sizes that are tried at first, and now and then: draft trees of other sizes have other shapes, and up to 5 nodes are mostly a chain.
COARSE = (0, 2, 5, 7, 15, 31, 63)
LEAST_PROBED = 0.5  # share of the best goodput that must be expected of a size that is tried
TRIAL = 4  # rounds with trees of one session, while the others decode plainly
TRIAL_SHARE = 0.01  # of the time of plain decoding, of all sessions of a step, that trials may cost
TRIAL_MEMORY = 16  # rounds that the known acceptance of a node counts for, at most, when a trial begins

MEMORY = 0.01  # weight of the newest round in the acceptance of a node
QUICK_MEMORY = 0.1  # the same in the time that the engine waits for a draft
FIRST_ACCEPTANCE = 0.5  # of the first node, while nothing is known
DECAY = 0.85  # of a node's acceptance against that of the node before, while nothing is known
PRIOR_ROUNDS = 4  # rounds that such an expectation counts for
MAX_KINDS = 256  # kinds of rounds that are remembered: requests choose some of the values that tell kinds apart


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A committed round.

    target_nodes    nodes that it waited for; 0: it decoded plainly
    observed_nodes  nodes of which the verdict tells whether they are accepted; a tree that was awaited in vain counts as rejected
    path            numbers of the accepted nodes, in draw order from 1
    wait            seconds that the engine stood idle for it, divided by `StepTime.speed`; None: not known
    found_nothing   it decoded plainly because a look-up found no continuation of the text
    """

    target_nodes: int = 0
    observed_nodes: int = 0
    path: tuple[int, ...] = ()
    wait: float | None = None
    found_nothing: bool = False


class Statistics:
    """What is known of one kind of rounds, and the present decision for its sessions."""

    def __init__(self) -> None:
        self._acceptance: list[Mean] = []  # of a node, by its number in draw order, from 0
        # By target_nodes: number of accepted nodes. Small trees are grown deep and large ones wide.
        self._accepted: defaultdict[int, Mean] = defaultdict(Mean)
        self._wait: defaultdict[int, Mean] = defaultdict(Mean)  # by target_nodes
        self.num_rounds = 0  # with trees
        self._share_with_tree = Mean(1.0)  # share of rounds with a tree among those that might have one
        self.target_nodes = self.max_nodes = 0  # of rounds that begin now: waited for, and verified
        self.usual_nodes = 0  # waited for by a round that is no probe
        self.usual_tokens = 1.0  # that such a round is expected to commit
        self.speedup = 1.0  # expected tokens per second with trees over plain decoding
        self.trial_speedup = 1.0  # the same if one session alone has trees, whose step delays all others
        self.active = False
        self.trial_session: int | None = None
        self.trial_left = 0  # rounds with trees; 0: there is no trial
        self.trial_patience = 0  # rounds until a trial whose trees do not come is over
        self.pause_left = 0  # plans until the next trial
        self.num_sessions = 0  # in the last plan
        self.probe_nodes = 0  # size that the next session to begin a round tries; 0: none
        self.num_plans = 0
        self.num_probes = 0
        self.next_probe = 0  # in plans

    # -- what is known ------------------------------------------------------------------------------------------------

    def tokens(self, most: int) -> list[float]:
        """Expected tokens of rounds with 0, 1, ..., most nodes, the bonus token included, from the acceptance of each node."""
        totals = [1.0]
        expected = FIRST_ACCEPTANCE
        for known in chain(self._acceptance[:most], repeat(Mean(), most - len(self._acceptance))):
            expected = (known.count * known.value + PRIOR_ROUNDS * expected) / (known.count + PRIOR_ROUNDS)
            totals.append(totals[-1] + expected)
            expected *= DECAY
        return totals

    def expected_tokens(self, sizes: Sequence[int]) -> dict[int, float]:
        """E(n), tokens of a round that waits for n nodes, the bonus token included, for ascending sizes."""
        by_number = self.tokens(sizes[-1])
        by_size = {}
        for nodes in sizes:
            mean = self._accepted.get(nodes, Mean())
            known = mean.count * (1.0 + mean.value)
            by_size[nodes] = (known + PRIOR_ROUNDS * by_number[nodes]) / (mean.count + PRIOR_ROUNDS)
        return by_size

    def draft_wait(self, nodes: int) -> float:
        """Expected time that the engine stands idle for so many nodes, in the unit of `RoundResult`.

        Taken from the nearest size that was tried, on the assumption that half of its time grows with the nodes."""
        if not nodes or not self._wait:
            return 0.0
        if nodes in self._wait:
            return self._wait[nodes].value
        tried = min(self._wait, key=lambda n: abs(math.log(n / nodes)))
        return self._wait[tried].value * (1.0 + nodes / tried) / 2

    def expected_trees(self, sessions: int) -> float:
        """Expected number of trees in a step of so many sessions, given that it has any. All sessions pay for the time of the step, so the
        trees of a few must be worth the time of the others."""
        return max(1.0, self._share_with_tree.value * sessions)

    @property
    def present_nodes(self) -> int:
        """Nodes that a round waits for now."""
        return self.usual_nodes if self.active else 0

    @property
    def present_tokens(self) -> float:
        """Tokens that such a round is expected to commit."""
        return self.usual_tokens if self.active else 1.0

    # -- learning -----------------------------------------------------------------------------------------------------

    def add(self, session: int, result: RoundResult) -> None:
        """A round of this session was committed."""
        trial = self.trial_left > 0 and self.trial_session == session
        if result.target_nodes or result.found_nothing:
            self._share_with_tree.add(float(not result.found_nothing), MEMORY)
        if not result.target_nodes:
            if trial:
                self.trial_patience -= 1
                if not self.trial_patience:
                    self._end_trial()
            return
        self.num_rounds += 1
        target, observed = result.target_nodes, result.observed_nodes
        self._accepted[target].add(sum(number <= target for number in result.path), MEMORY)
        path = set(result.path)
        self._acceptance += [Mean() for _ in range(observed - len(self._acceptance))]
        for number, mean in enumerate(self._acceptance[:observed], 1):
            mean.add(number in path, MEMORY)
        if result.wait is not None:
            self._wait[target].add(result.wait, QUICK_MEMORY)
        if trial:
            self.trial_left -= 1
            if not self.trial_left:
                self._end_trial()

    def continue_pause(self, sessions: int) -> bool:
        """Count one plan of the pause between two trials. False: there is no pause, it ends, or the number of sessions has changed, so the
        kind has to be planned. Otherwise the last plan holds: nothing is learned of trees during a pause, and a plan takes a few tenths of
        a millisecond of every step."""
        changed, self.num_sessions = sessions != self.num_sessions, sessions
        if changed or self.active or self.trial_left or self.pause_left <= 1:
            return False
        self.pause_left -= 1
        return True

    def forget_session(self, session: int) -> None:
        """The session has ended; another session continues its trial."""
        if self.trial_session == session:
            self.trial_session = None

    # -- the decision for its sessions --------------------------------------------------------------------------------

    def uses_trees(self, session: int) -> bool:
        """Whether a tree should grow for this session."""
        return self.active or (self.trial_left > 0 and self.trial_session == session)

    def wants_trees(self, session: int) -> bool:
        """Whether the session should have a drafter: a tree should grow for it, or nothing is known of trees yet."""
        return self.uses_trees(session) or not self.num_rounds

    def begin_round(self, session: int, most: int) -> tuple[int, int]:
        """(nodes to wait for, nodes to verify at most) of a round that begins now and may have `most`; (0, 0): plain decoding."""
        if self.trial_left and self.trial_session is None:
            self.trial_session = session
        if most < 1 or not self.uses_trees(session):
            return 0, 0
        if self.probe_nodes:  # one session tells as much of a size as all would, and costs less
            target, self.probe_nodes = min(most, self.probe_nodes), 0
            return target, target
        target = min(most, self.target_nodes)
        return target, max(target, min(most, self.max_nodes)) if target else 0

    def begin_trial(self) -> None:
        self.trial_left = TRIAL
        self.trial_session = None
        self.trial_patience = PROBE_EVERY
        for mean in self._acceptance:
            mean.count = min(mean.count, TRIAL_MEMORY)

    def deactivate(self) -> None:
        self.active = False
        self.probe_nodes = 0
        self._end_trial()

    def _end_trial(self) -> None:
        self.trial_left = 0
        self.trial_session = None
        lost = TRIAL * (1.0 / self.trial_speedup - 1.0)  # plain steps
        self.pause_left = max(PROBE_EVERY, round(lost / TRIAL_SHARE))


@dataclass(slots=True)
class SpeculationController:
    """Statistics by kind of round, and the decision for all of them."""

    step_time: StepTime = field(default_factory=StepTime)
    _kinds: dict[Hashable, Statistics] = field(default_factory=dict)

    def of(self, kind: Hashable) -> Statistics:
        """Statistics of this kind of rounds; those used longest ago are forgotten when there are too many."""
        statistics = self._kinds.pop(kind, None) or Statistics()
        self._kinds[kind] = statistics  # kinds are in the order of their last use
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return statistics

    @property
    def speedup(self) -> float:
        """Expected tokens per second with trees over plain decoding, mean over the kinds that have tried them."""
        tried = [statistics.speedup for statistics in self._kinds.values() if statistics.num_rounds]
        return sum(tried) / len(tried) if tried else 1.0

    def plan(
        self, sessions: Mapping[Statistics, int], *, plain: int = 0, most: int, from_drafters: bool = True
    ) -> None:
        """Decide for rounds that begin before the next plan.

        sessions: how many of each kind share the next step; plain: how many more decode plainly; most: nodes that a round may have;
        from_drafters: drafters grow the trees, perhaps on the target's machine, and not the verifier itself.
        """
        allowed = [*(size for size in SIZES if size < most), most]
        if not self.step_time.known or len(allowed) < 2:
            return
        for statistics, count in sessions.items():
            if not statistics.continue_pause(count):
                others = [(other, num) for other, num in sessions.items() if other is not statistics]
                self._plan_kind(statistics, count, others, plain, allowed, from_drafters)

    def _plan_kind(
        self,
        statistics: Statistics,
        count: int,
        others: Sequence[tuple[Statistics, int]],
        plain: int,
        allowed: Sequence[int],
        from_drafters: bool,
    ) -> None:
        """Decide the size of one kind while the others keep theirs. count: its sessions in the step; others: the other kinds and theirs."""
        trees = statistics.expected_trees(count)
        other_tokens = float(plain) + sum(
            num + other.expected_trees(num) * (other.present_tokens - 1) for other, num in others
        )
        other_rows = plain + sum(num + round(other.expected_trees(num) * other.present_nodes) for other, num in others)
        other_wait = max((other.draft_wait(other.present_nodes) for other, _ in others), default=0.0)
        others_active = any(other.active for other, _ in others)
        tokens = statistics.expected_tokens(allowed)
        rows = {n: other_rows + count + round(trees * n) for n in allowed}
        step_s = {
            n: self.step_time.seconds(rows[n], drafted=from_drafters and (n > 0 or others_active)) for n in allowed
        }
        committed = {n: other_tokens + count + trees * (tokens[n] - 1) for n in allowed}
        wait_s = {n: self.step_time.speed * max(other_wait, statistics.draft_wait(n)) for n in allowed}
        goodput = {n: committed[n] / (step_s[n] + wait_s[n]) for n in allowed}
        best = max(allowed[1:], key=goodput.__getitem__)
        alone_s = self.step_time.seconds(other_rows + count + best, drafted=from_drafters)
        alone_s += self.step_time.speed * statistics.draft_wait(best)
        statistics.num_plans += 1
        statistics.pause_left -= 1
        statistics.speedup = goodput[best] / goodput[0]
        statistics.trial_speedup = (committed[0] - 1.0 + tokens[best]) / alone_s / goodput[0]
        if statistics.active and statistics.speedup < LEAVE:
            statistics.deactivate()
        elif not statistics.active and statistics.speedup > ENTER:
            statistics.active = True
        elif not statistics.active and not statistics.trial_left and statistics.pause_left <= 0:
            statistics.begin_trial()
        statistics.usual_nodes, statistics.usual_tokens = best, tokens[best]
        # Nodes that have come beyond those that are waited for cost their rows only.
        statistics.target_nodes = best
        statistics.max_nodes = max(best, max(allowed[1:], key=lambda n: committed[n] / step_s[n]))
        if statistics.active and statistics.num_plans >= statistics.next_probe:
            probed = min(allowed[-1], self._probed(statistics, best, allowed[-1]))
            # plain decoding is looked at in any case: it is fast where drafters take the time of the target's machine
            if not probed:
                statistics.target_nodes = statistics.max_nodes = 0  # for all sessions, because a plain step has no tree
            elif goodput[probed] > LEAST_PROBED * max(goodput[0], goodput[best]):
                statistics.probe_nodes = probed

    @staticmethod
    def _probed(statistics: Statistics, best: int, most: int) -> int:
        """The size that is tried next, so that its statistics stay current: first the COARSE sizes, then in turn the larger neighbour of
        `best`, 0, the smaller neighbour and a COARSE size. COARSE sizes above `most` are left out: all would become `most`."""
        coarse = [nodes for nodes in COARSE if nodes <= most]
        first, num = 2 * (len(coarse) - 1), statistics.num_probes
        statistics.num_probes += 1
        if num < first:
            return coarse[1 + num // 2]
        statistics.next_probe = statistics.num_plans + min(PROBE_EVERY, max(8, statistics.num_plans // 4))
        at, turn = bisect_left(SIZES, best), (num - first) // 4
        others = SIZES[min(at + 1, len(SIZES) - 1)], 0, SIZES[at - 1], coarse[turn % len(coarse)]
        return others[num % 4]
