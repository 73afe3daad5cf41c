"""Quotas: the tokens that a tenant may use.

The tokens of a tenant are a bucket that fills at a steady rate, shared by all gateways through the session store. A request pays prompt +
max_tokens once, however often it is resumed, and gets back the tokens that it did not use. While the store does not answer, each gateway
counts by itself with the whole rate, so that an outage refuses no request.
"""

from __future__ import annotations

from typing import Self

from gateway.ledger import Entry, Ledger
from gateway.planning import Plan
from gateway.session_store import Rate, Record
from gateway.uncancelled import uncancelled


class Account:
    """Charges one request to its tenant; a context manager around the request on this gateway. Without a rate nothing is charged.

    A gateway that takes a request over from one that may still run, or has died, inherits the payment; one that resumes an interrupted
    request, whose rest was given back, pays for this rest again."""

    def __init__(self, ledger: Ledger, plan: Plan, rate: Rate | None):
        self._ledger, self._plan, self._rate = ledger, plan, rate
        self._price = len(plan.first.prompt) + plan.first.stopping.max_tokens
        self._paid = 0  # and not given back
        self._entry: Entry | None = None

    async def __aenter__(self) -> Self:
        """RateLimited when the tenant has used up its tokens. A request that is resumed is looked up first, see `resumed`."""
        if self._plan.request.resume is None:
            await self._pay(self._price)
        return self

    async def resumed(self, record: Record) -> None:
        """Pay the unpaid part of a resumed request. RateLimited."""
        if not record.finished:
            await self._pay(owed(self._price, len(self._plan.first.prompt), record))

    def started(self, entry: Entry) -> None:
        """The request runs; from now on its prompt counts as used."""
        self._entry = entry

    async def __aexit__(self, *_: object) -> None:
        used = len(self._plan.first.prompt) + len(self._entry.tokens) if self._entry else 0
        if self._rate is None or used >= self._paid:
            return
        # Clients may leave as soon as they have the last token.
        await uncancelled(self._give_back(self._paid - used, self._rate))

    async def _give_back(self, unused: int, rate: Rate) -> None:
        if self._entry is None or await self._ledger.confirmed(self._entry):
            await self._ledger.charge(self._plan.first.tenant, -unused, rate)

    async def _pay(self, cost: int) -> None:
        """What a request that is cancelled meanwhile has paid is given back."""
        tenant, rate = self._plan.first.tenant, self._rate
        if rate is not None and cost:
            await uncancelled(
                self._ledger.charge(tenant, cost, rate), lambda _: self._ledger.charge(tenant, -cost, rate)
            )
        self._paid = self._price


def owed(price: int, num_prompt: int, record: Record) -> int:
    """Tokens to pay for an unfinished request: all of an unknown one, none if the last gateway gave nothing back."""
    if not record.fields:
        return price
    return 0 if record.running else max(0, price - num_prompt - len(record.output))
