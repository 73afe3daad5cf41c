"""Compiles structured-output forms in a child process before any verifier sees them.

The compiler is native code that recurses over references and rules: a schema of a thousand chained `$ref`s overflows its stack, which ends
the process. The child compiles with a quarter of the stack of a verifier's thread, within limits of memory and time. A form that crashes
it, takes too long or does not compile is refused as `InvalidGrammar`.

`python -m gateway.grammar_check` is the child. Its pipes carry one JSON object a line. It reads the vocabulary, then one form at a time,
and writes one answer for each.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import resource
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import structlog

from rootward.core.requests import Form, Structure
from rootward.errors import InvalidGrammar, InvalidRequest, Unavailable

log = structlog.get_logger()

MAX_DEPTH = 64  # brackets of a schema inside one another
MAX_REFERENCES = 512  # in a schema
MAX_RULES = 512  # of a Lark grammar
STACK_BYTES = 2 << 20  # the thread that compiles at a verifier has 8 MiB
MEMORY_BYTES = 2 << 30  # address space of the child
COMPILE_S = 5.0
FORGET_S = 60.0  # after which a form whose check failed is checked again: the cause may have been outside of it
RETRY_S = 1.0  # after which a client may ask again when the child did not start
START_S = 30.0  # for the child to import its libraries and to read the vocabulary
MAX_REMEMBERED = 1024  # forms
MAX_ANSWER = 1 << 20  # bytes


class _Verdict(NamedTuple):
    """fix: the change that a form needs, None if it compiles. until_s: time of the loop at which the form is checked again."""

    fix: str | None
    until_s: float = math.inf


class _CheckFailed(Exception):
    """The child gave no answer; the message says what to change in the form, which is the likeliest cause."""


class GrammarCheck:
    """Owns the child, which starts with the first form and again after a crash. `tokenizer`: the model's as JSON; "" = it has none.

    Tenants take turns at the child: each has at most one form that waits for it."""

    def __init__(self, tokenizer: str):
        self._tokenizer = tokenizer
        self._child: Process | None = None
        self._exclusive = asyncio.Lock()  # one form at a time
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant
        self._asking: asyncio.Task[_Verdict] | None = None  # goes on when its client has gone
        self._verdicts: dict[bytes, _Verdict] = {}

    async def check(self, wanted: Structure, *, vocab_size: int, eos_ids: tuple[int, ...], tenant: str = "") -> None:
        """InvalidGrammar for a form that does not compile within the limits. Unavailable if the child does not start."""
        fix = beyond_limits(wanted)
        if fix is None and self._tokenizer and eos_ids:  # otherwise verifiers refuse forms without compiling them
            vocabulary = {"tokenizer": self._tokenizer, "vocab_size": vocab_size, "eos_ids": eos_ids}
            fix = await self._compiled(wanted, vocabulary, tenant)
        if fix is not None:
            begin = wanted.text if len(wanted.text) <= 32 else f"{wanted.text[:31]}…"
            raise InvalidGrammar(wanted.form.value, begin, fix)

    async def close(self) -> None:
        """End the child."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        await self._end_child()

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _compiled(self, wanted: Structure, vocabulary: Mapping[str, object], tenant: str) -> str | None:
        """What to change in the form; None if it compiles. A known form waits for no other one."""
        key = blake2b(f"{wanted.form.value} {wanted.text}".encode(), digest_size=16).digest()
        if (verdict := self._known(key)) is not None:
            return verdict.fix
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._exclusive:
            if self._asking is not None:
                await asyncio.wait({self._asking})
            if (verdict := self._known(key)) is None:
                self._asking = asyncio.create_task(self._judged(key, wanted, vocabulary))
                # The client may be gone: its exception counts as seen.
                self._asking.add_done_callback(lambda done: done.cancelled() or done.exception())
                verdict = await asyncio.shield(self._asking)
        return verdict.fix

    def _known(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        return verdict if verdict is not None and verdict.until_s > asyncio.get_running_loop().time() else None

    async def _judged(self, key: bytes, wanted: Structure, vocabulary: Mapping[str, object]) -> _Verdict:
        """The verdict of the child, which is remembered."""
        try:
            verdict = _Verdict(await self._ask(wanted, vocabulary))
        except _CheckFailed as error:
            verdict = _Verdict(str(error), until_s=asyncio.get_running_loop().time() + FORGET_S)
        self._verdicts.pop(key, None)
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]  # the oldest
        return verdict

    async def _ask(self, wanted: Structure, vocabulary: Mapping[str, object]) -> str | None:
        """The answer of the child. _CheckFailed if none comes in time, or if two children end without one: one may have been killed."""
        try:
            try:
                return await self._answer(wanted, vocabulary)
            except (ConnectionError, EOFError):
                await self._end_child()
                return await self._answer(wanted, vocabulary)
        except (TimeoutError, OSError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            log.warning("grammar_check_failed", form=wanted.form.value, characters=len(wanted.text), timeout=late)
            await self._end_child()
            cause = f"does not compile within {COMPILE_S:g} s" if late else "overflows the compiler"
            raise _CheckFailed(f"{cause}; use fewer or shorter chains of references, rules and repetitions") from error
        except BaseException:  # the gateway ends between a question and its answer
            await self._end_child()
            raise

    async def _answer(self, wanted: Structure, vocabulary: Mapping[str, object]) -> str | None:
        child = await self._running(vocabulary)
        async with asyncio.timeout(COMPILE_S):
            answer = await _exchange(child, {"form": wanted.form.value, "text": wanted.text})
        fix: str | None = answer["fix"]
        return fix

    async def _running(self, vocabulary: Mapping[str, object]) -> Process:
        """The child that has read the vocabulary. If it ends before that, which no form can cause, it is started once more."""
        child = self._child
        if child is not None and child.stdin is not None and not child.stdin.is_closing():
            return child  # checked by its pipe, since the end of a pipe is known before the end of its process
        try:
            try:
                return await self._started(vocabulary)
            except (ConnectionError, EOFError) as error:
                log.warning("grammar_check_ended_early", error=type(error).__name__)
                return await self._started(vocabulary)
        except (TimeoutError, OSError, EOFError) as error:  # no fault of the form, which is not remembered
            log.error("grammar_check_does_not_start", error=type(error).__name__)
            raise Unavailable(
                "the compiler of output forms does not start; try again", retry_after_s=RETRY_S
            ) from error

    async def _started(self, vocabulary: Mapping[str, object]) -> Process:
        await self._end_child()
        command = (sys.executable, "-m", "gateway.grammar_check")
        child = self._child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_ANSWER
        )
        async with asyncio.timeout(START_S):
            await _exchange(child, vocabulary)
        return child


def beyond_limits(wanted: Structure) -> str | None:
    """What to change in a form that is refused without compiling. Takes time in the length of the text and no recursion."""
    if wanted.form in (Form.JSON_SCHEMA, Form.JSON_OBJECT):
        if (depth := json_depth(wanted.text)) > MAX_DEPTH:
            return f"is nested {depth} deep; the limit is {MAX_DEPTH}"
        if (references := wanted.text.count('"$ref"')) > MAX_REFERENCES:
            return f"has {references} references; the limit is {MAX_REFERENCES}"
    elif wanted.form is Form.GRAMMAR:
        rules = sum(":" in line for line in wanted.text.splitlines())
        if rules > MAX_RULES:
            return f"has {rules} rules; the limit is {MAX_RULES}"
    return None


def json_depth(text: str) -> int:
    """The depth of nested brackets in a JSON text, without those in strings."""
    outside = "".join(text.replace(r"\\", "").replace(r"\"", "").split('"')[::2])
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[{\]}]", outside))
    return max(accumulate(steps, initial=0))


async def _exchange(child: Process, question: Mapping[str, object]) -> dict[str, Any]:
    """EOFError when the child ends without an answer."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(question).encode() + b"\n")
    except RuntimeError as error:  # uvloop, of a pipe that has closed
        raise EOFError from error
    await child.stdin.drain()
    line = await child.stdout.readline()
    if not line:
        raise EOFError
    answer: dict[str, Any] = json.loads(line)
    return answer


def _serve() -> None:
    """Answer until the pipe ends, or a form ends the process."""
    from rootward.core.tree import root_only
    from rootward.engine.grammar import Grammars, Vocabulary

    given: dict[str, Any] = json.loads(sys.stdin.readline())

    @cache
    def vocabulary() -> Vocabulary:
        from llguidance import LLTokenizer

        end_ids = tuple(given["eos_ids"])
        tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=list(end_ids))
        return Vocabulary(tokenizer, given["vocab_size"], end_ids)

    with suppress(ImportError):  # without the library each form is refused
        vocabulary()  # here, so that the first form has all its time to compile
    grammars = Grammars(vocabulary)
    print("{}", flush=True)
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        fix = None
        signal.setitimer(signal.ITIMER_REAL, 2 * COMPILE_S)  # ends this process even if the gateway was killed
        try:
            grammars.matcher(Structure(Form(question["form"]), question["text"])).masks(root_only())
        except InvalidRequest as error:
            fix = error.fix
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"fix": fix}), flush=True)


def main() -> None:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the gateway
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
