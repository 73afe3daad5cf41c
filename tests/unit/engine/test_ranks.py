"""The other ranks end with the one that serves, whatever they can still hear."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future

from rootward.engine.ranks import Ranks


class Deaf:
    """A group of which a rank has just ended."""

    closed = False

    def __init__(self) -> None:
        self.lost: Future[None] = Future()

    def dismiss(self) -> None:
        raise RuntimeError("Connection closed by peer")

    def close(self) -> None:
        self.closed = True


class Rank:
    """A process that would live on; as much of `multiprocessing.Process` as is asked of it."""

    name, exitcode = "rank 1", None

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    @property
    def sentinel(self) -> int:
        return self._process.stdin.fileno()  # type: ignore[union-attr]  # never readable

    def join(self, timeout: float | None = None) -> None:
        if timeout is None:
            self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


def test_ranks_that_cannot_be_sent_the_end_are_ended() -> None:
    group, rank = Deaf(), Rank()
    with Ranks(group, [rank]):  # type: ignore[arg-type, list-item]  # all that is asked of either
        pass
    assert rank.ended
    assert group.closed
