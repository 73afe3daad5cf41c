"""`benchmarks.stalls`: what is counted, and the table. Figures of engines are not asserted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from benchmarks import peers, stalls

WITH_PAUSE, ENDS = "question", "short question"


class PausingServer(BaseHTTPRequestHandler):
    """Streams text; a question's stream stops when a passage arrives and goes on when that has its first token."""

    arrived: ClassVar[threading.Event]
    answered: ClassVar[threading.Event]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if body["prompt"] == WITH_PAUSE:
            self.texts(stalls.EVENTS_BEFORE)
            assert self.arrived.wait(60)
            self.texts(1)
            assert self.answered.wait(60)
            self.texts(body["max_tokens"], pause_s=0.005)  # as from an engine: the reader may leave in between
        elif body["prompt"] == ENDS:
            self.texts(stalls.EVENTS_BEFORE + 1)
        elif body["prompt"] == stalls.SHORT:
            self.texts(2)
        else:
            self.arrived.set()
            threading.Event().wait(0.3)
            self.texts(1)
            self.answered.set()
            self.texts(1)

    def texts(self, count: int, pause_s: float = 0.0) -> None:
        for _ in range(count):
            try:
                self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            except OSError:  # the reader has gone
                return
            time.sleep(pause_s)

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    PausingServer.arrived, PausingServer.answered = threading.Event(), threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), PausingServer) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield peers.HttpEngine("plain", f"http://127.0.0.1:{found.server_port}", "model")
        found.shutdown()


def test_the_longest_pause_of_the_running_stream_is_found(engine):
    found = asyncio.run(stalls.stall(engine, WITH_PAUSE, "passage"))
    assert found.first_token_s >= 0.3 > found.short_first_token_s
    assert found.longest_s > 10 * found.usual_s
    assert found.num_texts == 1


def test_an_answer_that_ends_before_the_prompt_is_read_is_no_result(engine):
    with pytest.raises(RuntimeError, match="ended before the second began"):
        asyncio.run(stalls.stall(engine, ENDS, "passage"))


def test_the_table_has_medians_and_the_longest_of_all():
    same = {"usual_s": 0.01, "first_token_s": 2.0, "short_first_token_s": 0.25, "num_texts": 3}
    runs = [same | {"longest_s": x} for x in (0.2, 0.4, 0.9)]
    head = {"model": "m", "dtype": "bfloat16", "hardware": "CPU, 2 cores", "prompt_tokens": 2000}
    table = stalls.as_markdown(head | {"series": [{"system": "rootward", "mode": "plain", "runs": runs}]})
    assert "| Rootward, plain | 10 | 400 | 900 | 3 | 2.0 | 0.25 |" in table


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "--model: missing"),
        (("--model", "m", "--systems", "transformers"), "--systems: transformers has no server"),
        (("--model", "m", "--busy", "1"), "--busy: is an option of benchmarks.peers alone"),
    ],
)
def test_options_without_a_meaning_here_are_refused(flags, why, capsys):
    assert stalls.main(flags) == 2
    assert why in capsys.readouterr().err
