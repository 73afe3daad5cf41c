"""Does speculation pay, and with how many nodes? Learned from the rounds themselves.

With n nodes while L sessions share a step, a round yields and costs

    tokens   E(n) = 1 + Σ worth of the n best nodes                    `Worth`, from verdicts
    seconds  s(n) = slow · (step(L·(n + 1)) + growth(n))               `Machine`; growth: how long the engine stands idle for n nodes
    plain    p = step(L) while no drafter works

so its speed-up over plain decoding is E(n)·p / s(n). `slow` is what the sum does not explain, by load. Trees are used while the
best n is faster than plain decoding. Where they are not, one session at a time tries them now and then: if there is hope, and when the
engine has decoded plainly for so long that what they lost last time, on trial or in use, is SHARE of it; each failure doubles that.

Looks at past rounds, clocks and load only, never at a tree that has arrived: for such reasons a plain round is always allowed, and so is
a cap that is fixed when the round begins.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from verifier_service.cost import Machine
from verifier_service.worth import Worth

MEMORY = 0.1  # weight of the newest round in seconds
ENTER, LEAVE = 1.04, 0.98  # speed-ups at which all sessions begin to use trees, and stop
PLAIN_EVERY = 100  # steps with trees after which one is plain, so that what it costs stays current
LOOK_EVERY = 10  # and where it is in doubt whether trees pay
LOOK = 3  # steps for which all rounds that begin are plain, until there is one without trees: sessions that take turns need two
SURE = 2.0  # standard deviations of what trees cost that their gain must exceed
LOOKS = 10  # steps for which nobody uses trees before the speed of the machine is known, if others do
PROBE_EVERY = 24  # one round in so many waits for twice the nodes, or half, so that what the later ones are worth and take stays current
TRIAL = 5  # tree rounds before an opinion
TRIAL_NODES = 4  # least nodes of a round on trial: fewer say too little
MOST_LOST = 6  # plain steps that a trial may lose before it is over early
HOPE = 1.5  # a trial is due where trees would pay if the draft were so much better and growth took no time
SHARE = 0.01  # of plain decoding's time may be lost on trials
PROVEN = 50  # rounds of every session for which trees have to pay before earlier failures are forgotten
FIRST_REST, MOST_DOUBLED = 16, 8  # steps of plain decoding between trials at least; how often that doubles
TRIER_PATIENCE = 64  # plain rounds until a session on trial, whose tree does not come, gives up


@dataclass(slots=True)
class Mean:
    """Of the first values, then with a fading memory."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(MEMORY, 1.0 / self.count) * (value - self.value)


@dataclass(frozen=True, slots=True)
class Spent:
    """A round that was committed.

    tokens     committed
    seconds    since the commit before, of which the engine stood idle for idle_s
    rows       of its step, other sessions' included;  load: sessions that share steps
    cap, path  nodes that it waited for; numbers, in draw order from 1, of the accepted ones. cap 0: plain decoding
    clean      no prefill fell between
    kept       it was launched with what a right guess had kept: nothing was waited for
    seen       nodes about which the round tells: fewer than the cap if it did not wait for the others (None: all)
    """

    tokens: int
    seconds: float
    idle_s: float = 0.0
    rows: int = 1
    load: int = 1
    cap: int = 0
    path: tuple[int, ...] = ()
    clean: bool = True
    seen: int | None = None
    kept: bool = False


@dataclass(slots=True)
class Trial:
    """One session tries trees while the others decode plainly; when it ends another one goes on (None: not yet)."""

    session: int | None
    left: int = TRIAL
    patience: int = TRIER_PATIENCE
    lost_s: float = 0.0

    def over(self, step_s: float) -> bool:
        return self.left <= 0 or self.lost_s > MOST_LOST * step_s


@dataclass(slots=True)
class Forecast:
    """Speed-ups with 0, 1, … nodes that are waited for; grown: had they been there at once; usual: of the best tree where some rounds
    wait and some do not. best, best_grown: the number of nodes that is best up to each; top: of all trees. hopeful: a trial makes sense."""

    load: int
    speedups: list[float]
    usual: float = 1.0
    grown: list[float] = field(default_factory=list)
    hopeful: bool = False
    best: list[int] = field(init=False)
    best_grown: list[int] = field(init=False)
    top: int = field(init=False)

    def __post_init__(self) -> None:
        self.top = max(range(1, len(self.speedups)), key=self.speedups.__getitem__, default=0)
        self.best, self.best_grown = best_up_to(self.speedups), best_up_to(self.grown)


def look_due(unseen: int, every: int) -> bool:
    """After `every` steps without a plain one; and as long as none comes, since somebody always uses trees or reads a prompt, after twice
    as many, four times as many and so on."""
    begun = every << max(0, (unseen // every).bit_length() - 1)
    return begun <= unseen < begun + LOOK


def best_up_to(values: Sequence[float]) -> list[int]:
    """For every index that of the largest value up to there, the first one if there are several."""
    found: list[int] = []
    for n, value in enumerate(values):
        found.append(n if not found or value > values[found[-1]] else found[-1])
    return found


class Gain:
    """The opinion of sessions of one kind, on a machine that all kinds share."""

    def __init__(self, machine: Machine) -> None:
        self.worth, self._machine = Worth(), machine
        self._slow: dict[int, float] = {}  # by the binary logarithm of the load
        # Of tree rounds: tokens, and plain rounds that fit into their time.
        self._tokens, self._plain_rounds = Mean(), Mean()
        self.usual_nodes = 0  # of a round that is not the last one of its request
        self._on = self._despaired = False
        self._trial: Trial | None = None
        self._rest_s = 0.0  # of plain decoding until the next trial
        self._loss_s = 0.0  # of the engine's time since trees are in use; negative: they gained
        self._failed = self._num_rounds = self._proven = 0
        self._forecast = Forecast(0, [])
        self._forecasts_left = 0

    def uses_trees(self, session: int) -> bool:
        """Whether a tree should grow for this session."""
        return self._on or (self._trial is not None and self._trial.session == session)

    def wants_trees(self, session: int) -> bool:
        """The same, or they were never tried: a reason to have a drafter."""
        return self.uses_trees(session) or not self._tokens.count

    @property
    def speedup(self) -> float:
        """Measured tokens per second of rounds with trees over plain decoding; 1 while nothing is known."""
        return self._tokens.value / self._plain_rounds.value if self._plain_rounds.value else 1.0

    def expected(self, most: int, load: int) -> list[float]:
        """Speed-up of rounds that wait for 0, 1, …, most nodes."""
        return self._speedups(most, load, 1.0, self._slow.get(load.bit_length(), 1.0))

    def nodes(self, session: int, most: int, load: int, possible: int = 0) -> int:
        """Nodes that a round that begins now waits for: at most `most`, while `load` sessions share a step. 0: decode plainly.

        possible: nodes that other rounds may have now; the last ones of a request, which have few, say nothing of trees."""
        resting = not self._on and self._trial is None and self._rest_s > 0
        if most < 1 or resting or not self._machine.steps.known or self._looks():
            return 0
        forecast = self._forecast_for(max(most, possible), load)
        self._judge(forecast.usual, load)
        if not self._on and self._trial is None and self._rest_s <= 0:
            self._try(session, forecast, load)
        if self._trial is not None and self._trial.session is None:
            self._trial.session = session
        if not self.uses_trees(session):
            return 0
        self._num_rounds += 1
        if not self._on:
            return max(range(min(TRIAL_NODES, most), most + 1), key=forecast.speedups.__getitem__)
        best = forecast.top if forecast.top <= most else forecast.best[most]
        turn = self._num_rounds // load + session  # not the same session every time
        if turn % PROBE_EVERY:
            return best
        return min(most, 2 * best) if turn % (2 * PROBE_EVERY) else (best + 1) // 2

    def room(self, enough: int, most: int) -> int:
        """Cap of a round whose tree is waited for until it has `enough` nodes. What has arrived beyond them cost no wait, only its rows."""
        if not (enough and self._on and most < len(self._forecast.grown)):
            return enough
        return max(enough, self._forecast.best_grown[most])

    def add(self, session: int, spent: Spent) -> None:
        """A round was committed. Waiting for a tree in vain is a cost of trees: such a round has its cap, and no path."""
        trial = self._trial if self._trial is not None and self._trial.session == session else None
        if not spent.cap:
            self._rest_s -= spent.seconds / spent.load
            if trial is not None:
                trial.patience -= 1
                if not trial.patience:
                    self._fail()
            return
        plain_s = self._machine.plain_s(spent.load)
        self.worth.add(spent.cap if spent.seen is None else spent.seen, spent.path)
        self._tokens.add(spent.tokens)
        self._plain_rounds.add(spent.seconds / plain_s if plain_s else 1.0)
        if spent.clean and spent.kept:
            self._machine.growth.kept()
        elif spent.clean:
            self._machine.growth.add(spent.cap, spent.idle_s)
        if trial is not None:
            trial.left -= 1
            trial.lost_s += self._lost_s(spent)
        elif self._on and spent.clean:
            self._loss_s += (spent.seconds - spent.tokens * plain_s) / spent.load
            self._explain(spent)
            self._proven += 1
            if self._proven >= PROVEN * spent.load:
                self._failed = 0

    def gone(self, session: int) -> None:
        """It has ended; another one goes on with its trial."""
        if self._trial is not None and self._trial.session == session:
            self._trial.session = None

    def _looks(self) -> bool:
        """Whether a round is plain because a plain step would tell whether trees pay at all. All kinds of sessions count the same steps,
        and where one wants to look all do: no step is plain while somebody uses trees."""
        steps = self._machine.steps
        if not steps.warm and steps.unseen < LOOKS:
            return True
        gain = abs(math.log(self._forecast.usual)) if self._on else math.inf
        unsure = gain < SURE * steps.doubt(self._machine.trees)
        if look_due(steps.unseen, LOOK_EVERY if unsure else PLAIN_EVERY):
            steps.look_until = steps.unseen + 2  # the next step as well, for kinds that were asked before this one
        return steps.unseen < steps.look_until

    # -- opinion ------------------------------------------------------------------------------------------------------

    def _forecast_for(self, most: int, load: int) -> Forecast:
        """Made anew once a step, not for each of its sessions."""
        self._forecasts_left -= 1
        if self._forecasts_left < 0 or load != self._forecast.load or most >= len(self._forecast.speedups):
            hope = HOPE if self._tokens.count else 1.0
            hopeful = self._rest_s <= 0 and max(self._speedups(most, load, 0.0, 1.0, hope)) > ENTER
            grown, slow = self._speedups(most, load, 0.0, 1.0), self._slow.get(load.bit_length(), 1.0)
            usual = max(self._speedups(most, load, self._machine.growth.waits, slow)[1:], default=1.0)
            self._forecast = Forecast(load, self.expected(most, load), usual, grown, hopeful)
            self._forecasts_left = load - 1
        return self._forecast

    def _speedups(self, most: int, load: int, waits: float, slow: float, hope: float = 1.0) -> list[float]:
        """waits: share of rounds that wait for growth."""
        plain_s, tokens = self._machine.plain_s(load), self.worth.tokens_of_trees(most)
        found = [1.0]
        for n in range(1, most + 1):
            seconds = slow * (self._machine.step_s(load * (n + 1)) + waits * self._machine.growth.seconds(n))
            found.append((1.0 + hope * (tokens[n] - 1.0)) * plain_s / seconds if seconds > 0 else 1.0)
        return found

    def _judge(self, speedup: float, load: int) -> None:
        known = self._tokens.count >= TRIAL
        if self._on and speedup <= LEAVE:
            self._on = False
            self._rest(self._loss_s, load)
        elif not self._on and known and speedup >= ENTER and (self._trial is not None or self._rest_s <= 0):
            self._on, self._trial, self._proven, self._loss_s = True, None, 0, 0.0
        elif self._trial is not None and self._trial.over(self._machine.plain_s(load)):
            self._fail(load)

    def _try(self, session: int, forecast: Forecast, load: int) -> None:
        """Begin a trial; without hope only after a long rest, for what is known of large steps may be wrong."""
        if forecast.hopeful or self._despaired:
            self._trial, self._despaired = Trial(session), False
            self._slow = {bucket: slow**0.5 for bucket, slow in self._slow.items()}  # it need not be so any more
        else:
            self._despaired = True
            self._rest_s = FIRST_REST * 2.0**MOST_DOUBLED * self._machine.plain_s(load)

    def _fail(self, load: int = 1) -> None:
        lost_s = self._trial.lost_s if self._trial is not None else 0.0
        self._trial = None
        self._rest(lost_s, load)

    def _rest(self, lost_s: float, load: int) -> None:
        least_s = FIRST_REST * self._machine.plain_s(load)
        self._rest_s = max(least_s, lost_s / SHARE) * 2.0**self._failed
        self._failed = min(self._failed + 1, MOST_DOUBLED)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _lost_s(self, spent: Spent) -> float:
        """Engine time that a round on trial took beyond what its tokens would have taken without a tree."""
        plain_s = self._machine.plain_s
        own_s = min(self._machine.step_s(spent.rows), spent.seconds) - plain_s(max(1, spent.rows - spent.cap))
        return spent.idle_s + own_s - (spent.tokens - 1) * plain_s(spent.load) / spent.load

    def _explain(self, spent: Spent) -> None:
        machine = self._machine
        rows = max(spent.rows, spent.load * (spent.cap + 1))  # more than was waited for may have come
        expected_s = machine.step_s(rows) + (0.0 if spent.kept else machine.growth.seconds(spent.cap))
        if expected_s > 0:
            bucket, ratio = spent.load.bit_length(), min(4.0, max(0.5, spent.seconds / expected_s))
            slow = self._slow.get(bucket, 1.0)
            self._slow[bucket] = slow + MEMORY * (ratio - slow)


@dataclass(slots=True)
class Gains:
    """The opinions of all kinds of sessions. Those alike share what they learn, so that a short request pays for no trial of its own."""

    machine: Machine = field(default_factory=Machine)
    _kinds: dict[Hashable, Gain] = field(default_factory=dict)

    def of(self, kind: Hashable) -> Gain:
        return self._kinds.setdefault(kind, Gain(self.machine))

    @property
    def speedup(self) -> float:
        """Measured speed with trees over plain decoding, mean over the kinds of sessions that have tried them."""
        known = [gain.speedup for gain in self._kinds.values() if gain.speedup != 1.0]
        return sum(known) / len(known) if known else 1.0
