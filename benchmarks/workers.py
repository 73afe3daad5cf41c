"""The parts of a run, one after another here or side by side in processes of one thread each.

Small models on a CPU gain little from threads and lose much when cores are busy; parts side by side use every core.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from os import cpu_count
from queue import Empty
from typing import Any

from benchmarks.measuring import Part, load_pair, measure, tasks
from benchmarks.options import Options
from rootward.errors import ConfigurationError, RootwardError

Done = Callable[[str], None]
LOOK_AGAIN_S = 2.0


def run(options: Options, done: Done) -> tuple[dict[str, Any], list[Part]]:
    """(what a report says of the models, the parts in the order of `tasks`)."""
    num = min(options.processes or cpu_count() or 1, len(tasks(options)))
    described, parts = _here(options, done) if num == 1 else _in_processes(options, num, done)
    order = {task: i for i, task in enumerate(tasks(options))}
    return described, sorted(parts, key=lambda part: order[part.task])


def _here(options: Options, done: Done) -> tuple[dict[str, Any], list[Part]]:
    pair = load_pair(options)
    return pair.described(), [measure(pair, options, task, done) for task in tasks(options)]


def _in_processes(options: Options, num: int, done: Done) -> tuple[dict[str, Any], list[Part]]:
    context = multiprocessing.get_context("spawn")
    todo, news = context.Queue(), context.Queue()
    for i in (*range(len(tasks(options))), *[None] * num):
        todo.put(i)
    workers = [context.Process(target=_work, args=(options, todo, news), daemon=True) for _ in range(num)]
    for worker in workers:
        worker.start()
    described: dict[str, Any] = {}
    parts: list[Part] = []
    try:
        while len(parts) < len(tasks(options)):
            kind, content = _next(news, workers)
            if kind == "step":
                done(content)
            elif kind == "pair":
                described = content
            elif kind == "part":
                parts.append(content)
            else:
                raise ConfigurationError(*content)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return described, parts


def _next(news: Any, workers: list[Any]) -> tuple[str, Any]:
    while True:
        try:
            found: tuple[str, Any] = news.get(timeout=LOOK_AGAIN_S)
            return found
        except Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise RootwardError(
                    "a worker process of the benchmark died; run with --processes 1 to see why"
                ) from None


def _work(options: Options, todo: Any, news: Any) -> None:
    """A worker: load the pair, take tasks until there are none, or nobody is left to hear of them."""
    import torch

    torch.set_num_threads(1)
    news.cancel_join_thread()  # what nobody reads must not keep the process from ending
    parent = multiprocessing.parent_process()
    assert parent is not None

    def done(name: str) -> None:
        if not parent.is_alive():
            raise SystemExit(1)
        news.put(("step", name))

    try:
        pair = load_pair(options)
        news.put(("pair", pair.described()))
        while (index := todo.get()) is not None:
            news.put(("part", measure(pair, options, tasks(options)[index], done)))
    except ConfigurationError as wrong:
        news.put(("wrong", (str(wrong), wrong.exit_code)))
    parent.join()  # it reads the last message and then ends this process; or is gone itself
