"""Ranks wait for the last of them to be started, however long a step may take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist

from rootward.engine import parallel


def test_ranks_wait_for_one_that_still_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "STEP_TIMEOUT", timedelta(milliseconds=10))
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        early = [threads.submit(parallel.assemble, store, index, 3) for index in (0, 2)]
        assert not wait(early, timeout=0.2).done
        parallel.assemble(store, 1, 3)
        for rank in early:
            rank.result(timeout=60)
    with pytest.raises(dist.DistStoreError):  # from here on a missing rank is an error soon
        store.get("nobody")
