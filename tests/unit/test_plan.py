"""`rootward plan`: the forecast of measured rounds, what would help, and the load that is measured."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from unit.gateway.service_for_tests import serving, until
from unit.gateway.tokenizers_for_tests import byte_level

from benchmarks.plan_check import as_markdown, compared
from gateway.app import build_app
from gateway.models import Models
from gateway.requests import Chat
from gateway.tokenizer import TokenNumbers
from rootward.client import Speculation
from rootward.demo import paths, read_prompts, smollm2_head
from rootward.errors import ConfigurationError, InvalidRequest
from rootward.host import available_cores
from rootward.plan.__main__ import default_threads, is_head, lookup_beside, main, prompts_of, service_flags
from rootward.plan.forecast import (
    PAYS,
    Change,
    acceptance_by_depth,
    forecast,
    forecasts,
    tokens_with_half_the_rejections,
)
from rootward.plan.measurement import Arrival, EngineTime, Measured, Run, accepted_by_round, engine_time
from rootward.plan.report import answer, as_json, tables
from rootward.wire.http_server import HttpServer

NUM_ROUNDS = 60


def run(load: int, accepted: int, *, step_s: float, draft_s: float = 0.0, around_s: float = 0.0) -> Run:
    """Rounds that accept so many tokens each; around_s: of a round, neither forward nor drafting."""
    engine = EngineTime(NUM_ROUNDS * step_s, NUM_ROUNDS)
    tokens = NUM_ROUNDS * load * (1 + accepted)
    seconds = NUM_ROUNDS * (step_s + draft_s + around_s)
    return Run(load, seconds, tokens, Counter({accepted: NUM_ROUNDS * load}), engine)


def measured(
    *,
    load: int = 1,
    row_s: float = 0.0,
    step_s: float = 0.05,
    draft_s: float = 0.005,
    accepted: int = 3,
    auto: float | None = None,
    lookup: float | None = None,
) -> Measured:
    """Rounds that accept the first `accepted` nodes, or as many as there are. auto, lookup: speed-ups; `auto` is that of the best trees if
    it is not given."""
    around_s = 0.001
    plain = run(load, 0, step_s=step_s + row_s * load, around_s=around_s)
    trees = {
        nodes: run(
            load,
            min(accepted, nodes),
            step_s=step_s + row_s * load * (nodes + 1),
            draft_s=draft_s,
            around_s=around_s,
        )
        for nodes in (2, 4, 8, 16)
    }
    best = auto or max(1.0, *(one.rate / plain.rate for one in trees.values()))

    return Measured(
        0.0,
        load,
        plain,
        Run(load, plain.seconds, round(plain.tokens * best)),
        None if lookup is None else Run(load, plain.seconds, round(plain.tokens * lookup)),
        trees,
    )


def test_four_tokens_a_round_at_no_cost_are_four_times_the_speed() -> None:
    found = forecast(measured(draft_s=0.0))
    assert found.with_trees == pytest.approx(4.0)
    assert found.speedup == pytest.approx(4.0, rel=0.01)
    assert found.speed == pytest.approx(4 / 0.051, rel=0.01)


def test_speed_up_is_that_of_the_services_where_the_drafter_is_near() -> None:
    """Not that of the best trees: the controller may draft from the text instead, and pays for its trials."""
    found = forecast(measured(auto=1.7))
    assert found.speedup == pytest.approx(1.7, rel=0.01)
    assert found.with_trees > 3.0


def test_trials_that_cost_speed_are_reported() -> None:
    found = forecast(measured(accepted=0, auto=0.9))
    assert found.speedup == pytest.approx(0.9, rel=0.02)
    assert not found.pays


@pytest.mark.parametrize(
    ("pair", "rtt_ms", "change"),
    [
        (measured(draft_s=0.2), 0.0, Change.DRAFT),
        (measured(row_s=0.02, step_s=0.01), 0.0, Change.ROWS),
        (measured(accepted=1), 0.0, Change.ACCEPTANCE),
        (measured(), 300.0, Change.DISTANCE),
    ],
    ids=lambda value: value.name if isinstance(value, Change) else "",
)
def test_names_the_term_that_costs_most(pair: Measured, rtt_ms: float, change: Change) -> None:
    assert forecast(pair, rtt_ms=rtt_ms).helps_most is change


def test_names_nothing_where_no_change_would_gain_anything() -> None:
    found = forecast(measured(draft_s=0.0, accepted=16))
    assert max(found.changes.values()) == pytest.approx(found.with_trees)
    assert found.helps_most is None


def test_time_of_a_round_is_divided_into_drafts_rows_and_the_rest() -> None:
    pair = measured(load=4, row_s=0.001, draft_s=0.02)
    for nodes in pair.trees:
        assert pair.draft_s(nodes) == pytest.approx(0.02)
        assert pair.row_s(nodes) == pytest.approx(0.004 * nodes)
    without_metrics = Measured(0.0, 1, Run(1, 1.0, 10), Run(1, 1.0, 10), None, {2: Run(1, 1.0, 10)})
    assert (without_metrics.draft_s(2), without_metrics.row_s(2)) == (0.0, 0.0)


def test_time_of_a_draft_head_counts_as_drafting() -> None:
    head = Run(1, 0.6, 40, Counter({3: 10}), EngineTime(steps_s=0.6, num_steps=10, head_s=0.1))
    pair = Measured(0.0, 1, Run(1, 0.5, 10, Counter({0: 10}), EngineTime(0.5, 10)), head, None, {4: head})
    assert pair.draft_s(4) == pytest.approx(0.01)


def test_distance_makes_every_round_longer() -> None:
    near, far, beyond = (forecast(measured(), rtt_ms=ms).speedup for ms in (0, 20, 2000))
    assert near > far > PAYS
    assert far == pytest.approx(4 * 0.051 / (0.056 + 0.02))
    assert beyond == 1.0
    assert forecast(measured(lookup=1.4), rtt_ms=2000).speedup == pytest.approx(1.4, rel=0.01)


def test_half_of_the_rejections() -> None:
    assert tokens_with_half_the_rejections(Counter({0: 5, 1: 5}), deepest=1) == pytest.approx(1 + 0.75)
    assert tokens_with_half_the_rejections(Counter({0: 5, 1: 5}), deepest=2) == pytest.approx(1 + 0.75 + 0.375)
    assert tokens_with_half_the_rejections(Counter({2: 3}), deepest=2) == pytest.approx(3.0)
    assert tokens_with_half_the_rejections(Counter({0: 3}), deepest=3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_acceptance_is_reported_by_depth() -> None:
    assert acceptance_by_depth(Run(1, accepted=Counter({0: 1, 1: 1, 3: 2}))) == [0.75, 0.5, 0.5]
    assert acceptance_by_depth(Run(1)) == []


def test_rounds_end_with_their_bonus_tokens_however_they_arrive() -> None:
    yes, no = True, False
    arrivals = [
        Arrival(0.0, 1, (yes, yes, no, no)),  # two rounds
        Arrival(0.1, 2, (yes,)),
        Arrival(0.1, 1, (yes,)),  # a part of one
        Arrival(0.2, 1, (no,)),
        Arrival(0.3, 2, (no,)),
    ]
    assert accepted_by_round(arrivals) == Counter({2: 1, 0: 1, 1: 2})


def test_engine_time_is_read_from_metrics_without_prefill() -> None:
    text = (
        b'rootward_step_duration_seconds_sum{kind="prefill"} 9.0\n'
        b'rootward_step_duration_seconds_count{kind="prefill"} 3.0\n'
        b'rootward_step_duration_seconds_sum{kind="verify"} 2.0\n'
        b'rootward_step_duration_seconds_count{kind="verify"} 4.0\n'
        b'rootward_step_duration_seconds_sum{kind="plain"} 1.0\n'
        b'rootward_step_duration_seconds_count{kind="plain"} 2.0\n'
        b"rootward_draft_head_seconds_total 0.6\n"
    )

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.handle_request, daemon=True).start()
        found = engine_time(f"127.0.0.1:{server.server_port}")
    assert found == EngineTime(steps_s=3.0, num_steps=6, head_s=0.6)
    assert found.forward_s == pytest.approx(0.4)


def test_answers_in_one_sentence() -> None:
    good, bad = measured(), measured(load=8, accepted=0, auto=0.98)
    assert answer(forecasts([good], rtts_ms=[0.0])).startswith("Yes: ")
    assert answer(forecasts([bad], rtts_ms=[0.0])).startswith("No: decode plainly")
    assert "but not at temperature 0 with 8 sessions" in answer(forecasts([good, bad], rtts_ms=[0.0]))


def test_plan_reports_when_the_speed_up_is_that_of_n_grams() -> None:
    said = answer(forecasts([measured(accepted=1, auto=1.6, lookup=1.7)], rtts_ms=[0.0]))
    assert said.startswith("Yes, but not for this draft: 1.60 x")
    assert "n-grams of the text alone give 1.70 x" in said
    assert "(n-grams alone: 1.20 x)" in answer(forecasts([measured(lookup=1.2)], rtts_ms=[0.0]))


def test_json_has_measurements_and_forecasts() -> None:
    pairs = [measured(lookup=1.1), measured(load=8)]
    report = json.loads(json.dumps(as_json(pairs, forecasts(pairs, rtts_ms=[0.0, 5.0]), about={"target": "t"})))
    assert (report["target"], len(report["measured"]), len(report["forecasts"])) == ("t", 2, 4)
    assert report["forecasts"][0]["pays"]
    assert report["measured"][0]["trees"][1]["draft_ms"] == pytest.approx(5.0)
    assert report["measured"][1]["lookup_tokens_per_s"] is None


def test_tables_have_every_temperature_and_load() -> None:
    pairs = [measured(), measured(load=8)]
    rounds, acceptance, forecast_table = tables(pairs, forecasts(pairs, rtts_ms=[0.0]))
    assert (rounds.row_count, acceptance.row_count, forecast_table.row_count) == (10, 1, 2)


def test_error_of_the_forecast_is_relative_to_the_measurement() -> None:
    forecasts_made = [
        {"temperature": 0, "load": 1, "rtt_ms": 0, "plain_tokens_per_s": 10.0, "tokens_per_s": 30.0, "speedup": 3.0}
    ]
    rows = compared({"forecasts": forecasts_made}, [{"temperature": 0, "load": 1, "plain": 10.0, "auto": 20.0}])
    assert rows[0]["speedup_error"] == pytest.approx(0.5)
    table = as_markdown([{"name": "pair", "rows": rows}])
    assert "**+50%**" in table
    assert "0 of 1 of the speed-up, median error 50%" in table


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--load", "0"], "--load: 0"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--prompts", "/nowhere"], "--prompts"),
        (["--nodes", "999"], "--nodes: 999"),
        (["--rtt", "5"], "--rtt: 5.0: ngram drafts in the verifier"),
        (["--out", "/nowhere/plan.png"], "--out: no folder '/nowhere'"),
        (["--out", "plan.txt"], "--out: 'plan.txt': name a .png, .svg or .pdf file"),
    ],
)
def test_wrong_options_are_refused_by_name(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(paths().target), "ngram", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_plan_uses_as_many_threads_as_services_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROOTWARD_NUM_THREADS", raising=False)
    assert default_threads() == available_cores()
    file = tmp_path / "services.yaml"
    file.write_text("model: demo\nnum-threads: 7\n")
    monkeypatch.setenv("ROOTWARD_CONFIG", str(file))
    assert default_threads() == 7
    monkeypatch.setenv("ROOTWARD_NUM_THREADS", "3")
    assert default_threads() == 3
    monkeypatch.setenv("ROOTWARD_NUM_THREADS", "0")
    assert main([str(paths().target), "ngram"]) == 2
    assert "num_threads: '0' is not valid" in capsys.readouterr().err


def test_a_distance_to_a_draft_head_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tabular:vocab=24,seed=1", str(smollm2_head()), "--rtt", "5"]) == 2
    assert "--rtt: 5.0: a draft head drafts in the verifier" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rootward.plan.report.find_spec", lambda name: None)
    assert main(["/no/model", "/no/draft", "--out", str(tmp_path / "plan.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_heads_are_distinguished_from_models() -> None:
    assert is_head(str(smollm2_head()))
    assert not is_head(str(paths().draft))
    assert not is_head("ngram")


def test_prompts_are_lines_or_json_lines(tmp_path) -> None:
    plain, lines, wrong = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_bytes(b"one\r\n\ntwo\n")
    lines.write_text('{"text": "one\u2028\x85two"}\n{"text": "three"}\n', encoding="utf-8")
    wrong.write_text("{}\n")
    assert read_prompts(plain) == ["one", "two"]
    assert read_prompts(lines) == ["one\u2028\x85two", "three"]
    with pytest.raises(ConfigurationError, match="no object with `text`"):
        read_prompts(wrong)


def test_services_of_a_plan_are_those_of_serve_all() -> None:
    target, draft, head = str(paths().target), str(paths().draft), str(smollm2_head())
    assert service_flags(target, "ngram", sessions=4)[2:6] == ["--model", target, "--draft-model", "none"]
    assert service_flags(target, draft, sessions=4)[2:6] == ["--model", target, "--draft-model", draft]
    own = service_flags(target, head, sessions=32, nodes=8, admin="127.0.0.1:1")
    assert "none" in own
    verifier = next(flag for flag in own if flag.startswith("--verifier-flags="))
    for part in (
        f"--local-draft head:{head}",
        "--max-num-seqs 32",
        "--num-draft-tokens 8",
        "--admin-listen 127.0.0.1:1",
    ):
        assert part in verifier


def test_look_up_is_measured_beside_every_other_draft() -> None:
    assert lookup_beside("ngram") is None
    assert lookup_beside(str(paths().draft)) == Speculation(drafter="ngram")
    assert lookup_beside(str(smollm2_head())) == Speculation(drafter="ngram")


def _refusal(body: dict) -> dict:
    """The gateway's answer where a model without a tokenizer is served."""
    numbers = TokenNumbers()
    call = (
        partial(numbers.encode_chat, Chat(body["messages"]))
        if "messages" in body
        else partial(numbers.encode, body["prompt"])
    )
    with pytest.raises(InvalidRequest) as error:
        call()
    return {"error": {"message": str(error.value)}}


def test_prompts_are_tokens_of_the_gateway() -> None:
    """As a chat where there is a template; a refusal makes plain text of it, and a second one random tokens."""

    def served(accepted: str) -> list[list[int]]:
        class Gateway(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200 if accepted in body else 400)
                self.end_headers()
                answer = {"tokens": list(range(600)) if "messages" in body else [5, 6]}
                self.wfile.write(json.dumps(answer if accepted in body else _refusal(body)).encode())

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Gateway) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            found = prompts_of(f"http://127.0.0.1:{server.server_port}", ["a", "b"], raw=False)
            server.shutdown()
        return found

    assert served("messages") == [list(range(88, 600))] * 2  # of a long one the end
    assert served("prompt") == [[5, 6]] * 2
    assert len(served("nothing")) == 16


@asynccontextmanager
async def http_serving(**settings: int) -> AsyncIterator[str]:
    """URL of a gateway over HTTP, whose model has a tokenizer and no chat template."""
    async with serving(**settings) as service, asyncio.TaskGroup() as group:
        server = HttpServer("127.0.0.1:0")
        group.create_task(server.run_until_stopped(build_app(Models([service]))))
        await until(lambda: server._server is not None and server._server.started)
        yield f"http://{server.address}"
        server.stop()


async def test_of_a_long_prompt_the_end_is_sent_and_other_refusals_name_the_prompt() -> None:
    def tokens(url: str, *texts: str) -> list[list[int]]:
        return prompts_of(url, texts, raw=False)

    async with http_serving() as url:
        long, short = await asyncio.to_thread(tokens, url, "a" * 100_000 + "end", "b")
        assert byte_level().decode(long).endswith("end")
        assert byte_level().decode(short) == "b"
    async with http_serving(max_prompt_characters=10) as url:
        with pytest.raises(
            ConfigurationError, match=r"--prompts: prompt 2 is refused \(prompt: 11 characters are more"
        ):
            await asyncio.to_thread(tokens, url, "short", "eleven char")


def test_an_empty_name_and_ctrl_c_end_a_plan_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["", "demo"]) == 2
    assert "target: '' names no model" in capsys.readouterr().err

    def interrupted(given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rootward.plan.__main__._measured", interrupted)
    assert main(["demo", "demo"]) == 130
