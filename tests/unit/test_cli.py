"""The command: what it prints, and how it ends when the user or the server errs."""

import asyncio
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from unit.gateway.service_for_tests import IDS, TEXT, grpc_serving, until
from unit.gateway.verifier_for_tests import SpellingVerifier

import rootward
from gateway.auth import read_keys
from rootward import AsyncClient, errors
from rootward.cli import administration, check_pair, doctor, output, top
from rootward.cli.check import COMPARED_TOKENS, TREES, _samples, two_sample_p_value
from rootward.cli.check_pair import Side, compare
from rootward.cli.main import exit_code, main
from rootward.cli.output import print_delta, visible
from rootward.cli.serve import READY, command_of, services_running
from rootward.client.types import TokenDelta
from rootward.core.requests import Form, SpeculationMode, Structure
from rootward.demo import paths
from rootward.ports import ModelInfo
from rootward.v1 import generate_pb2


async def run(*arguments):
    return await asyncio.to_thread(main, [str(a) for a in arguments])


async def test_generate_streams_the_text(capsys):
    async with grpc_serving() as (_, address):
        assert await run("generate", "a", "--url", address, "--stats") == 0
    out, err = capsys.readouterr()
    assert TEXT + "\n" in out
    assert "block efficiency" in err
    assert f"{len(IDS)} after a prompt of 1" in err


async def test_generate_passes_sampling_and_speculation(capsys):
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (_, address):
        sampling = ["--temperature", 0, "--top-p", 0.9, "--top-k", 5, "--max-tokens", 7, "--seed", 3]
        others = ["--stop", "zz", "--no-speculation", "--url", f"grpc://{address}"]
        assert await run("generate", "a", *sampling, *others) == 0
    got = verifier.requests[-1]
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (0, 0.9, 5)
    assert (got.stopping.max_tokens, got.seed, got.speculation.mode) == (7, 3, SpeculationMode.DISABLED)


async def test_json_output_is_one_object(capsys):
    async with grpc_serving() as (_, address):
        assert await run("generate", "a", "--url", address, "--output", "json") == 0
        out = capsys.readouterr().out
        answer = json.loads(out[out.index("{") :])
        assert (answer["text"], tuple(answer["token_ids"])) == (TEXT, IDS)
        assert answer["speculation"]["num_plain_steps"] == 1
        assert "raw" not in answer
        assert await run("status", "--url", address, "--output", "json") == 0
        out = capsys.readouterr().out
        assert json.loads(out[out.index("{") :])["server"]["models"][0]["name"] == "demo"


async def test_generate_passes_processors_and_forms(capsys, tmp_path):
    verifier = SpellingVerifier()
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    async with grpc_serving(verifier) as (_, address):
        processors = ["--min-p", "0.1", "--repetition-penalty", "1.2", "--frequency-penalty", "-1", "--min-tokens", "3"]
        assert await run("generate", "a", "--url", address, *processors, "--logprobs", "2", "--output", "json") == 0
        out = capsys.readouterr().out
        told = json.loads(out[out.index("{") :])["logprobs"]
        assert len(told) == len(IDS)
        assert set(told[0]) == {"logprob", "top"}
        assert await run("generate", "a", "--url", address, "--json-schema", str(schema)) == 0
        first, second = verifier.requests
        s = first.sampling
        assert (s.min_p, s.repetition_penalty, s.frequency_penalty) == (0.1, 1.2, -1.0)
        assert (first.stopping.min_tokens, first.logprobs) == (3, 2)
        assert second.structure == Structure(Form.JSON_SCHEMA, '{"type": "object"}')


async def test_a_schema_may_come_from_standard_input(monkeypatch, tmp_path, capsys):
    verifier = SpellingVerifier()
    monkeypatch.setattr("sys.stdin", io.StringIO('{"type": "array"}'))
    async with grpc_serving(verifier) as (_, address):
        assert await run("generate", "a", "--url", address, "--json-schema", "-") == 0
        assert verifier.requests[0].structure == Structure(Form.JSON_SCHEMA, '{"type": "array"}')
        (tmp_path / "latin").write_bytes(b"\xe9")
        assert await run("generate", "a", "--url", address, "--json-schema", tmp_path / "latin") == 2
        assert "--json-schema: '" in capsys.readouterr().err


async def test_status(capsys):
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (service, address):
        assert await run("status", "--url", address) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("gateway", "verifier", "drafter", "draft-1", "ready", "demo (context 256,"))
        verifier.up = False
        await until(lambda: not service.ready)
        assert await run("status", "--url", address) == 4
        assert "no verifier is ready" in capsys.readouterr().err


def printed(view) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(view)
    return console.file.getvalue()


def test_texts_in_tables_are_no_markup():
    from rootward.client.types import Load, ServerInfo, VerifierLoad, Worker
    from rootward.doctor import Finding, Level

    text = "[/x] [fd00::12]:50061 [red]"
    found = printed(output.key_values({text: text}))
    found += printed(check_pair._table([check_pair.Finding("context", text, text, "ok", text)]))
    found += printed(doctor._table([Finding(text, Level.OK, text, text)]))
    assert found.count(text) == 2 + 3 + 3
    load = Load(0, 0, 16, False, verifiers=(VerifierLoad(text, True, 0, 0, 8, {f"drafter_caught/{text}": 1.0}),))
    assert printed(top._view(text, load, load)).count(text) == 2
    info = ServerInfo("1.0", "gateway", text, verifiers=(Worker(text, text, "", True, False),))
    assert printed(administration._table(text, info, load)).count(text) == 1 + 2 + 2 + 1


async def test_a_stop_string_like_markup_is_shown(capsys):
    async with grpc_serving(SpellingVerifier(text="x[/INST]y")) as (_, address):
        assert await run("generate", "a", "--url", address, "--stop", "[/INST]", "--stats") == 0
    assert "stop ('[/INST]')" in capsys.readouterr().err


def test_a_gateway_reads_the_names_of_new_keys(tmp_path, capsys):
    path = tmp_path / "keys.yaml"
    for name in ("app \N{GRINNING FACE}", 'é "\\\t\x7f\x85\u2028\ufeff: #', "\U0010ffff"):
        assert main(["keys", "new", name, "--tenant", name]) == 0
        path.write_text("keys:\n" + capsys.readouterr().out, encoding="utf-8")
        assert [(entry.name, entry.tenant) for entry in read_keys(path).values()] == [(name, name)]


async def test_abort_ends_a_generation_and_names_it(capsys):
    verifier = SpellingVerifier(run=1, delay_s=0.3)  # would take seconds to its end
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        stream = client.stream("a", request_id="mine")
        deltas = aiter(stream)
        await anext(deltas)
        assert await run("abort", "mine", "other", "--url", address) == 2
        assert (await stream.get_final_result()).finish_reason == "aborted"
        out, err = capsys.readouterr()
        assert out.splitlines()[-1:] == ["mine"]  # the services log before it
        assert "request_ids: 'other': no such request runs; it has ended" in err
        stream = client.stream("a", request_id="mine")
        deltas = aiter(stream)
        await anext(deltas)
        assert await run("abort", "mine", "--url", address) == 0


async def test_drain_lets_nothing_new_in(capsys):
    async with grpc_serving() as (_, address):
        assert await run("drain", "--url", address, "--timeout-s", "1") == 0
        assert capsys.readouterr().out.splitlines()[-1:] == ["0 running"]  # the services log before it
        assert await run("generate", "a", "--url", address, "--timeout", "1") == 4
        assert await run("drain", "--url", f"{address},{address}") == 2
        assert "are several gateways" in capsys.readouterr().err


def test_status_names_drafters_that_the_audit_has_caught():
    from rootward.client.types import Load, VerifierLoad

    stats = {"drafter_caught/10.0.0.7:50061": 1.0, "drafters_up": 2.0}
    verifiers = (VerifierLoad("v", True, 0, 0, 8, stats), VerifierLoad("w", True, 0, 0, 8, stats))
    assert Load(0, 0, 16, False, verifiers=verifiers).caught_drafters == ["10.0.0.7:50061"]
    assert Load(0, 0, 8, False).caught_drafters == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "temperature: -1.0 is outside [0, 100]"),
        (["--top-p", "0"], "top_p: 0.0 is outside (0, 1]"),
        (["--max-tokens", "0"], "max_tokens: 0 is below 1"),
        (["--max-tokens", "999"], "max_tokens: 999 is more than"),
        (["--top-k", "-1"], "top_k: -1 is out of range"),
        (["--model", "other"], "model: 'other' is not served here; use 'demo'"),
        (["--verification", "hope"], "speculation.verification: 'hope' is unknown"),
        (["--stop", ""], "stop: '' is not 1 to 1024 characters long"),
        (["--min-p", "2"], "min_p: 2.0 is outside [0, 1]"),
        (["--presence-penalty", "3"], "presence_penalty: 3.0 is outside [-2, 2]"),
        (["--logprobs", "21", "--output", "json"], "logprobs: 21 is outside [0, 20]"),
        (["--regex", "a", "--min-tokens", "2"], "structured_output: 'regex' cannot be combined with min_tokens"),
    ],
)
async def test_invalid_options_are_one_line_and_exit_code_2(flags, words, capsys):
    async with grpc_serving() as (_, address):
        assert await run("generate", "a", "--url", address, *flags) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rootward: ")]
    assert len(err) == 1
    assert words in err[0]


async def test_a_prompt_longer_than_the_context(capsys):
    async with grpc_serving() as (_, address):
        assert await run("generate", "ab " * 300, "--url", address) == 2
    assert "leave no room; this model's maximum context length is 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["generate"], 2, "Missing argument"),
        (["generate", "x", "--heat", "3"], 2, "--heat"),
        (["generate", "x", "--temperature", "hot"], 2, "--temperature"),
        (["generate", "x", "--logprobs", "2"], 2, "--output json"),
        (["generate", "x", "--json-schema", "/nowhere"], 2, "/nowhere"),
        (
            ["generate", "x", "--json-schema", ""],
            2,
            "--json-schema: '' names no file; name a file with a JSON schema, or -",
        ),
        (["generate", "-", "--json-schema", "-"], 2, "--json-schema: - is standard input, which is the prompt already"),
        (["generate", "x", "--url", "http://h:1"], 2, "target: 'http://h:1' has scheme 'http'"),
        (["generate", "x", "--url", "127.0.0.1:1", "--timeout", "5"], 4, "url: no answer from the server"),
        (["status", "--url", "127.0.0.1:1"], 4, "rootward serve all"),
        (["status", "--url", "127.0.0.1:1", "--api-key", "key\n"], 2, "api_key: has a line break"),
        (["generate", "x", "--url", "127.0.0.1:1", "--api-key", "schlüssel"], 2, "api_key: has"),
        (
            ["doctor", "--gateway", "grpcs://127.0.0.1:1", "--tls-authority", "/nowhere"],
            2,
            "--tls-authority: '/nowhere'",
        ),
        (["doctor", "--gateway", "127.0.0.1:1", "--tls-certificate", "/x"], 2, "without --tls-authority and --tls-key"),
        (
            ["doctor", "--gateway", "127.0.0.1:1", "--tls-authority", "/x", "--tls-key", "/y"],
            2,
            "without --tls-certificate",
        ),
        (["doctor", "--tls-certificate", "/x"], 2, "--tls-certificate: is for the certificates of a system"),
        (["check-pair", "/nowhere", "/nowhere"], 2, "no folder at '/nowhere'"),
        (
            ["status", "--url", "127.0.0.1:99999"],
            2,
            "target: '127.0.0.1:99999' has port 99999; use one from 1 to 65535",
        ),
        (["check", ""], 2, "target: '' names no model"),
        (["download", "", "/nowhere/new"], 2, "url: '' names nothing; give hf://ORG/NAME@REVISION"),
        (["download", "file:///nowhere", ""], 2, "folder: '.' is no new folder"),
        (["keys", "new", ""], 2, "name: '' is empty"),
        (["keys", "new", "a", "--expires", "2020-01-01T00:00:00Z"], 2, "expires: '2020-01-01T00:00:00Z' is past"),
        (["check-pair", "demo", "/nowhere.gguf"], 2, "no file at '/nowhere.gguf'"),
    ],
)
def test_mistakes_without_a_server(arguments, code, words, capsys):
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_help_and_documents_name_every_verification_rule(capsys):
    assert main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    parameters = (Path(__file__).resolve().parents[2] / "docs" / "parameters.md").read_text(encoding="utf-8")
    for name in generate_pb2.Speculation.Verification.keys()[1:]:
        assert name.lower() in shown
        assert parameters.count(f"`{name.lower()}`") >= 2


def test_help_and_version(capsys):
    for asked in ("version", "--version"):
        assert main([asked]) == 0
        assert capsys.readouterr().out.strip() == rootward.__version__
    for page in (
        ["--help"],
        ["generate", "-h"],
        ["serve", "--help"],
        ["check-pair", "--help"],
        ["check", "--help"],
        ["status", "--help"],
    ):
        assert main(page) == 0
        assert "Usage" in capsys.readouterr().out


def completed(shell, *words):
    """What a shell is told of a command line; without words, the script that asks."""
    program = "import sys; sys.argv[0] = 'rootward'; from rootward.cli.main import main; sys.exit(main())"
    line = " ".join(("rootward", *words))
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = {**os.environ, "_ROOTWARD_COMPLETE": f"{'complete' if words else 'source'}_{shell}", **asked}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_subcommands_and_flags(shell):
    assert "_ROOTWARD_COMPLETE" in completed(shell)
    assert all(name in completed(shell, "che") for name in ("check", "check-pair"))
    assert "--draft-model" in completed(shell, "serve", "all", "--dra")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("serve", "gateway", "--max-num-q"), {"--max-num-queued-reqs", "--max-num-queued-tokens"}),
        (("serve", "verifier", "--model", "x", "--log-json", "--local"), {"--local-draft"}),
        (("serve", "drafter", "--target-t"), {"--target-tokenizer"}),
        (("plan", "TARGET", "DRAFT", "--r"), {"--raw", "--rtt"}),
        (("bench", "serve", "--pro"), {"--profile", "--prompts"}),
        (("generate", "text", "--no-spec"), {"--no-speculation"}),
    ],
)
def test_completes_the_flags_of_every_program(words, flags):
    assert set(completed("bash", *words).split()) == flags


def test_flags_of_plan_are_completed_without_torch():
    code = "import sys; from rootward.plan.__main__ import parser; parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_a_missing_api_key_names_its_flag(monkeypatch, capsys):
    def refused(*arguments, **options):
        raise errors.AuthenticationError("authorization: no API key was sent", code="UNAUTHENTICATED")

    monkeypatch.setattr("rootward.client.Client.__init__", refused)
    assert main(["status"]) == 2
    assert "no API key was sent; --api-key or ROOTWARD_API_KEY gives the key" in capsys.readouterr().err


def test_a_bug_is_exit_code_1_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("rootward.client.Client.__init__", lambda *a, **k: 1 / 0)
    assert main(["status"]) == 1
    assert capsys.readouterr().err.startswith("rootward: internal error (ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "status"])


def test_doctor_refuses_an_authority_without_certificates(tmp_path, capsys):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    flags = ["--gateway", "grpcs://127.0.0.1:1", "--tls-authority", str(tmp_path / "ca.pem")]
    assert main(["doctor", *flags]) == 2
    assert "ca.pem' has no certificates" in capsys.readouterr().err


def test_exit_codes():
    assert exit_code(errors.ConfigurationError("x", exit_code=3)) == 3
    assert exit_code(errors.UnavailableError("x")) == 4
    assert exit_code(errors.APITimeoutError("x")) == 4
    assert exit_code(errors.DeadlineExceededError("x")) == 4
    assert exit_code(errors.BadRequestError("x")) == 2
    assert exit_code(errors.InternalServerError("x")) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "rootward: a command is missing; see rootward serve --help"),
        (["generate", "x", "--zzz", "3"], "rootward: No such option: --zzz; see rootward generate --help"),
        (["nope"], "rootward: No such command 'nope'; see rootward --help"),
    ],
)
def test_a_wrong_command_line_names_its_own_help(arguments, words, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == words


def test_services_are_started_by_module_name(monkeypatch):
    assert command_of("verifier", ["--model", "x"])[1:] == ["-m", "verifier_service", "--model", "x"]
    monkeypatch.setattr("rootward.cli.serve.find_spec", lambda name: None)
    with pytest.raises(errors.ConfigurationError, match=r"pip install 'rootward\[gateway,worker\]'"):
        command_of("all", [])


@pytest.mark.parametrize("words", [("bench", "rounds"), ("train-draft",)], ids=" ".join)
def test_the_installed_command_runs_programs_that_are_only_in_a_checkout(words, tmp_path):
    """It has no folder of the checkout on its path, unlike `python -m rootward.cli` started there."""
    command = [Path(sys.executable).with_name("rootward"), *words, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"usage: rootward {' '.join(words)}" in done.stdout


def test_what_is_only_in_a_checkout_is_refused_without_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("rootward.cli.serve.CHECKOUT", tmp_path)
    known = find_spec
    monkeypatch.setattr("rootward.cli.serve.find_spec", lambda name: None if name == "training" else known(name))
    assert main(["train-draft", "--help"]) == 2
    assert (
        "train-draft: training is not part of the package; install Rootward from a checkout" in capsys.readouterr().err
    )


def test_services_of_a_command_are_open_to_it_whatever_the_environment_says(monkeypatch):
    names = ["rootward_api_keys", "ROOTWARD_PUBLIC_TLS_KEY", "ROOTWARD_TLS_AUTHORITY", "ROOTWARD_TLS_PEERS"]
    for name in [*names, "ROOTWARD_NUM_THREADS"]:
        monkeypatch.setenv(name, "/nowhere")
    told = f"import os; print(*sorted(n for n in os.environ if 'ROOTWARD' in n.upper()), 'rootward all{READY}here')"
    monkeypatch.setattr("rootward.cli.serve.command_of", lambda role, flags: [sys.executable, "-c", told])
    with services_running([], start_timeout_s=60) as lines:
        assert lines[0].startswith("ROOTWARD_NUM_THREADS rootward all")


def test_services_of_a_command_do_not_use_the_redis_of_the_environment(monkeypatch):
    for name in ["rootward_redis_url", "ROOTWARD_REDIS_URL"]:
        monkeypatch.setenv(name, "redis://127.0.0.1:1/0")
    told = f"import os; print(*sorted(n for n in os.environ if 'REDIS' in n.upper()), 'rootward all{READY}here')"
    monkeypatch.setattr("rootward.cli.serve.command_of", lambda role, flags: [sys.executable, "-c", told])
    with services_running([], start_timeout_s=60) as lines:
        assert lines[0].startswith("rootward all")


@pytest.mark.parametrize("role", ["all", "gateway"])
def test_a_service_refuses_unknown_flags_itself(role):
    command = [sys.executable, "-m", "rootward.cli", "serve", role, "--max-num-seq", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"rootward {role}: --max-num-seq: unknown flag")


def test_tokens_are_coloured_by_origin_on_a_terminal_only():
    delta = TokenDelta("ab\x1b[2J", (1, 2), (True, False), spans=(("a", True), ("b\x1b[2J", False)))
    terminal, plain = io.StringIO(), io.StringIO()
    print_delta(Console(file=terminal, force_terminal=True, color_system="standard"), delta)
    print_delta(Console(file=plain), delta)
    assert terminal.getvalue() == "\x1b[32ma\x1b[0m\x1b[33mb\ufffd[2J\x1b[0m"
    assert plain.getvalue() == delta.text


def test_control_characters_do_not_reach_the_terminal():
    assert visible("a\tb\nc\x1b\x07\x9b\x7f") == "a\tb\nc" + 4 * "\ufffd"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m rootward.cli --help | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert "Traceback" not in done.stderr


def side(*, num_padding: int = 4, **info) -> Side:
    fitting = {"tokenizer_hash": "hash", "vocab_size": 100, "max_positions": 1024, "eos_ids": (0,)}
    return Side(ModelInfo("model", **fitting | info), num_padding)


def verdicts(target, draft, difference=""):
    return {f.name: f.verdict for f in compare(target, draft, difference)}


def test_pairs():
    assert set(verdicts(side(), side()).values()) == {"ok"}
    assert verdicts(side(), side(tokenizer_hash="other"))["tokenizer"] == "error"
    assert verdicts(side(), side(), "first differing token: 3")["tokenizer"] == "error"
    assert verdicts(side(), side(vocab_size=96, num_padding=0))["vocabulary"] == "ok"
    assert verdicts(side(), side(vocab_size=95))["vocabulary"] == "error"
    assert verdicts(side(), side(max_positions=512))["context"] == "note"
    assert verdicts(side(max_positions=512), side())["context"] == "ok"
    assert verdicts(side(), side(eos_ids=()))["end tokens"] == "note"
    assert verdicts(side(), side(supports_trees=False))["token trees"] == "error"
    bare = {"tokenizer_hash": "", "num_padding": 0}
    assert verdicts(side(**bare), side(**bare, vocab_size=101))["vocabulary"] == "error"


@pytest.mark.skipif(not (paths().draft / "tokenizer.json").is_file(), reason="the demo pair is not trained yet")
def test_check_pair_on_real_folders(tmp_path, capsys):
    target = str(paths().target)
    assert main(["check-pair", "demo", "demo"]) == 0
    assert "tokenizer" in capsys.readouterr().out
    other = tmp_path / "other"
    other.mkdir()
    for file in paths().draft.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = (t for t, i in vocab.items() if i in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert main(["check-pair", target, str(other), "--output", "json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert "first differing token: 300 is" in err


def test_samples_of_one_distribution_pass_and_others_do_not():
    rng = np.random.default_rng(0)
    values = [two_sample_p_value(*rng.choice(30, (2, 400), p=ZIPF).tolist()) for _ in range(200)]
    assert 0.3 < np.mean(values) < 0.7  # uniform
    assert np.mean(np.array(values) < 0.05) < 0.12
    other = 0.8 * ZIPF + 0.2 * ZIPF[::-1]
    assert two_sample_p_value(rng.choice(30, 2000, p=ZIPF).tolist(), rng.choice(30, 2000, p=other).tolist()) < 1e-6
    assert two_sample_p_value([7] * 50, [7] * 50) == 1.0
    assert two_sample_p_value([7] * 50, [8] * 50) < 1e-9


ZIPF = 1.0 / np.arange(1, 31)
ZIPF /= ZIPF.sum()


def test_check_reports_why_the_services_do_not_start(capfd):
    assert main(["check", "/nowhere"]) == 2
    assert "'/nowhere' is not a folder" in capfd.readouterr().err


@pytest.mark.parametrize("wrong", [None, "with seeds", "without"])
async def test_check_compares_samples_of_both_rules(wrong):
    """Requests with a seed are verified by match, others by traversal: an error of either is found."""
    rng = np.random.default_rng(5)

    class Client:
        async def generate(self, text, *, sampling, speculation):
            kind = "without" if sampling.seed is None else "with seeds"
            law = np.full(30, 1 / 30) if (speculation, kind) == (TREES, wrong) else ZIPF
            return SimpleNamespace(
                token_ids=rng.choice(30, COMPARED_TOKENS, p=law).tolist(),
                speculation=SimpleNamespace(num_accepted_draft_tokens=1),
            )

    without, with_seeds = await _samples(Client(), ["a", "b"], 400, 1e-6)
    assert bool(without.failures) == (wrong == "without")
    assert bool(with_seeds.failures) == (wrong == "with seeds")
    assert without.number == with_seeds.number == 2 * COMPARED_TOKENS
