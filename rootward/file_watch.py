"""Files that change under a running process: keys, certificates. Kubernetes swaps a symbolic link, people overwrite."""

from __future__ import annotations

from pathlib import Path

from rootward.clock import Clock, SystemClock

LOOK_AGAIN_S = 1.0  # least time between two looks


class WatchedFiles:
    """Reports whether any of some files has changed, with at most one look a second: cheap enough to ask on every call."""

    def __init__(self, *paths: Path, clock: Clock | None = None):
        self._paths = paths
        self._clock = clock or SystemClock()
        self._looked_at = self._clock.now()
        self._stamp = self._stamps()

    def changed(self) -> bool:
        """True if they have changed since the last call, or since the start."""
        now = self._clock.now()
        if now - self._looked_at < LOOK_AGAIN_S:
            return False
        self._looked_at = now
        before = self._stamp
        self._stamp = self._stamps()
        return self._stamp != before

    def _stamps(self) -> list[tuple[int, int, int]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with what the path leads to, also when a link on the way to it is swapped; zeros if nothing is there."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
