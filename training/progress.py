"""What a phase shows while it runs, and remembers for the loss curve."""

import sys

from tqdm import tqdm


class Progress:
    """A progress bar of the phase, with the running training loss and the last held-out loss."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.training: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        interval = 0.5 if sys.stderr.isatty() else 30.0
        form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = tqdm(total=1000, desc=name, bar_format=form, mininterval=interval, dynamic_ncols=True)
        self._running = 0.0
        self._steps = 0

    def resume(self, steps: int, training: list[tuple[int, float]], held_out: list[tuple[int, float]]) -> None:
        """Go on with the curves of a run that stopped after so many steps."""
        self._steps, self.training, self.held_out = steps, training, held_out
        self._running = training[-1][1] if training else 0.0

    def step(self, done: float, loss: float | None = None) -> None:
        """Note one step at this fraction of the phase. loss: None where nothing is trained."""
        if loss is not None:
            self._trained(loss)
        self._bar.update(min(1000, int(done * 1000)) - self._bar.n)

    def _trained(self, loss: float) -> None:
        self._steps += 1
        self._running = loss if not self._running else 0.98 * self._running + 0.02 * loss
        if self._steps % 20 == 0:
            self.training.append((self._steps, self._running))
            last = f"{self.held_out[-1][1]:.3f}" if self.held_out else "-"
            self._bar.set_postfix_str(f"step {self._steps} loss {self._running:.3f} held-out {last}", refresh=False)

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss at a step."""
        self.held_out.append((step, loss))
        tqdm.write(f"{self.name}: step {step}, held-out loss {loss:.4f}", file=sys.stderr)

    def close(self) -> None:
        """Leave the finished bar on its line."""
        self._bar.update(1000 - self._bar.n)
        self._bar.close()
