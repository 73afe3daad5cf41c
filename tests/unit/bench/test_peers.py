"""`benchmarks.peers`: missing engines, requests, jobs and tables. Figures are not asserted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from benchmarks import peers, peers_report
from rootward.demo import paths
from rootward.errors import ConfigurationError


class CompletionServer(BaseHTTPRequestHandler):
    """Streams as many tokens as requested, then the usage."""

    bodies: ClassVar[list[dict]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write('data: {"choices": [{"text": "a\u2028\x85"}]}\n\n'.encode())  # as llama.cpp writes them
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    CompletionServer.bodies = []
    with ThreadingHTTPServer(("127.0.0.1", 0), CompletionServer) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def report(**changes) -> dict:
    series = [
        {"system": system, "mode": mode, "temperature": 0.0, "batch": batch, "tokens_per_s": rate, "first_token_ms": 9}
        | {"runs": [{"tokens": rate, "seconds": 1.0}]}
        for system, mode, batch, rate in (("rootward", "plain", 1, 30.0), ("vllm", "plain", 1, 20.0))
    ]
    head = {"model": "m", "draft": None, "dtype": "bfloat16", "hardware": "CPU, 2 cores", "threads": 2, "commit": "c"}
    head |= {"date": "2026-01-02", "versions": {"torch": "2"}, "max_tokens": 8, "repeats": 3, "missing": {}}
    return head | {"series": series} | changes


def peers_tokenizer(given):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    return lambda text: len(tokenizer(text)["input_ids"])


def test_a_run_counts_the_tokens_of_all_requests(server):
    engine = peers.HttpEngine("plain", server, "model", {"speculation": "disabled"})
    run = asyncio.run(engine.run(peers.Job(("one", "two", "three"), 0.7, 5, seed=1)))
    assert run.tokens == 15
    assert 0 < run.first_token_s <= run.seconds
    assert {body["prompt"] for body in CompletionServer.bodies} == {"one", "two", "three"}
    for body in CompletionServer.bodies:
        assert (body["temperature"], body["ignore_eos"], body["speculation"]) == (0.7, True, "disabled")


def test_prompts_of_all_jobs_differ():
    given = peers.parser().parse_args(["--model", str(paths().target), "--batches", "1", "32", "--repeats", "2"])
    jobs = peers.jobs_of(given)
    texts = [prompt for job in jobs for prompt in job.prompts]
    assert [len(job.prompts) for job in jobs] == [1, 32] * 2 * 3
    assert len(set(texts)) == len(texts)


def test_each_setting_has_all_kinds_of_tasks():
    """One had "Explain …" alone and another one programs, so their gains could not be compared."""
    given = peers.parser().parse_args(["--model", str(paths().target), "--batches", "1", "8", "--repeats", "5"])
    tasks = defaultdict(set)
    for job in peers.jobs_of(given):
        for prompt in job.prompts:
            found = [i for i, task in enumerate(peers.TASKS) if task.partition("{")[0] in prompt]
            tasks[job.temperature, len(job.prompts)].update(found)
    assert set(map(len, tasks.values())) == {len(peers.TASKS)}


def test_long_prompts_are_different_passages_with_a_question():
    given = peers.parser().parse_args(["--model", str(paths().target), "--batches", "2", "--prompt-tokens", "700"])
    texts = peers.prompts_of(given, 5)
    count = peers_tokenizer(given)
    assert all(700 <= count(text) < 900 for text in texts)
    assert all(any(task in text for task in peers.READING_TASKS) for text in texts)
    beginnings = {text.replace(f"{i + 1}. ", "", 1)[:60] for i, text in enumerate(texts)}
    assert len(beginnings) == len(texts)


def test_a_passage_longer_than_the_documentation_is_refused():
    given = peers.parser().parse_args(["--model", str(paths().target), "--prompt-tokens", "9000000"])
    with pytest.raises(ConfigurationError, match="--prompt-tokens: 9000000, the documentation has"):
        peers.prompts_of(given, 1)


def test_the_time_per_output_token_excludes_the_first():
    assert peers.Run(tokens=22, seconds=3.0, first_token_s=1.0).token_s(batch=2) == pytest.approx(0.2)
    assert peers.Run(tokens=1, seconds=1.0, first_token_s=1.0).token_s(batch=1) == 0.0


@pytest.mark.parametrize(
    ("system", "flags", "command"),
    [
        ("llama.cpp", ["--llama-server", "no-such-binary"], "cmake"),
        ("vllm", ["--vllm", "no-such-binary"], "pip install"),
    ],
)
def test_a_missing_engine_is_reported_with_the_command_that_installs_it(system, flags, command):
    given = peers.parser().parse_args(["--model", "m", "--systems", system, *flags])

    async def start():
        async with peers.STARTS[system](given):
            pass

    with pytest.raises(peers.MissingError, match=command):
        asyncio.run(start())


def test_markdown_names_processor_date_and_commit_and_marks_the_best():
    text = peers_report.as_markdown([report(missing={"llama.cpp": "build it"})])
    for words in (
        "CPU, 2 cores",
        "2026-01-02",
        "commit c",
        "llama.cpp was not installed",
        "| Rootward, plain | **30.0** |",
    ):
        assert words in text


def test_ratios_are_of_the_runs_of_one_repetition_with_their_standard_error():
    series = [
        {"system": "rootward", "mode": mode, "temperature": 0.0, "batch": batch}
        | {
            "runs": [{"tokens": tokens, "seconds": seconds} for seconds in (1.0, 2.0)]
        }  # the machine is slower, for both
        for mode, batch, tokens in (("plain", 1, 10), ("speculative", 1, 15), ("plain", 8, 10))
    ]
    series.append(
        {**series[1], "system": "vllm", "runs": [{"tokens": 10, "seconds": 1.0}, {"tokens": 14, "seconds": 1.0}]}
    )
    series.append({**series[0], "system": "vllm", "runs": [{"tokens": 10, "seconds": 1.0}] * 2})
    assert peers_report.ratios_of(report(series=series)) == [
        ["Rootward", "1.50 ± 0.00", ""],
        ["vLLM", "1.20 ± 0.20", ""],
    ]


def test_the_readme_tables_replace_what_is_between_the_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{peers_report.BEGIN}\nold\n{peers_report.END}\nafter\n")
    peers_report.write_readme(path, [report()])
    text = path.read_text()
    assert text.startswith(f"before\n{peers_report.BEGIN}\n")
    assert text.endswith(f"{peers_report.END}\nafter\n")
    assert "| vLLM, plain | 20.0 |" in text
    assert "old" not in text


def test_a_comparison_has_the_columns_of_all_reports_and_marks_the_best_of_each():
    other = report()
    other["hardware"] = "Other CPU, 4 cores"
    other["series"] = [series | {"tokens_per_s": 50.0 - series["tokens_per_s"]} for series in other["series"]]
    text = peers_report.comparison([report(), other])
    assert "| tokens/s, 1 request at once | CPU, T = 0 | Other CPU, T = 0 |" in text
    assert "| Rootward, plain | **30.0** | 20.0 |" in text
    assert "| vLLM, plain | 20.0 | **30.0** |" in text
    assert text.count("commit c") == 2


def test_a_readme_without_markers_is_refused(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("no markers")
    with pytest.raises(ValueError, match="no markers"):
        peers_report.write_readme(path, [report()])


def test_the_chart_has_a_panel_for_every_processor_and_temperature(tmp_path):
    other = report()
    other["hardware"] = "Other CPU, 4 cores"
    peers_report.chart([report(), other], tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    for words in ("CPU, T = 0", "Other CPU, T = 0", "Rootward, plain", "vLLM, plain"):
        assert f"<!-- {words} -->" in drawn
    warmer = report()
    warmer["series"] = [series | {"temperature": 1.0} for series in warmer["series"]]
    peers_report.chart([report(), warmer], tmp_path / "other.svg")  # two of its four panels are empty
    assert (tmp_path / "other.svg").read_text().count("<!-- Rootward, plain -->") == 2


def test_a_chart_without_a_result_of_one_request_is_refused(tmp_path):
    eight = report()
    eight["series"] = [series | {"batch": 8} for series in eight["series"]]
    with pytest.raises(ConfigurationError, match="--plot: no result is of one request at once"):
        peers_report.chart([eight], tmp_path / "bars.svg")
