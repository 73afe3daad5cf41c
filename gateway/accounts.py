"""What a request costs its tenant: prompt + max_tokens, paid once, however often it is resumed; what was not used is given back.

Who drives the request holds what was paid for it: who takes it over from a driver that may still run, or has died, inherits that; who takes
it up after it was interrupted, and its rest given back, pays for this rest again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from gateway.ledger import Entry, Ledger
from gateway.planning import Plan
from gateway.quotas import Rate
from gateway.sessions import RUNNING, Record


class Account:
    """Of one drive of one request; a context manager around it. No rate: nothing costs anything."""

    def __init__(self, ledger: Ledger, plan: Plan, rate: Rate | None):
        self._ledger, self._plan, self._rate = ledger, plan, rate
        self._price = len(plan.first.prompt) + plan.first.stopping.max_tokens
        self._held = 0  # paid, and not given back so far
        self._entry: Entry | None = None

    async def __aenter__(self) -> Self:
        """RateLimited when the tenant has used up its tokens. What is resumed is looked up first, see `resumed`."""
        if self._plan.request.resume is None:
            await self._pay(self._price)
        return self

    async def resumed(self, record: Record) -> None:
        """Pay what is left to pay of a request that is known, or not. RateLimited."""
        if not record.finished:
            await self._pay(owed(self._price, len(self._plan.first.prompt), record))

    def driven(self, entry: Entry) -> None:
        """It runs; from now on its prompt is used."""
        self._entry = entry

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        used = len(self._plan.first.prompt) + len(self._entry.tokens) if self._entry else 0
        if self._rate is None or used >= self._held:
            return
        if self._entry is None or await self._ledger.confirmed(self._entry):
            await self._ledger.charge(self._plan.first.tenant, used - self._held, self._rate)

    async def _pay(self, cost: int) -> None:
        if self._rate is not None and cost:
            await self._ledger.charge(self._plan.first.tenant, cost, self._rate)
        self._held = self._price


def owed(price: int, num_prompt: int, record: Record) -> int:
    """Tokens to pay for an unfinished request: all of an unknown one, nothing where the last driver gave nothing back."""
    if not record.fields:
        return price
    return 0 if record.fields["state"] == RUNNING else max(0, price - num_prompt - len(record.output))
