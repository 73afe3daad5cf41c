"""Settings: precedence, and errors that say in one line what to change."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from rootward.errors import ConfigurationError
from rootward.settings import ServiceSettings


class Speculative(BaseModel, extra="forbid"):
    method: Literal["draft_model", "none"] = "none"
    max_depth: int = 4


class Settings(ServiceSettings):
    """Runs a service."""

    model: str = Field(description="folder or name of the model")
    max_num_seqs: int = Field(8, ge=1, description="most sessions at once")
    stream: bool = Field(True, description="send tokens as they come")
    peers: tuple[str, ...] = ()
    key: SecretStr | None = Field(None, min_length=4)
    speculative_config: Speculative = Speculative()


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: from-file\nmax-num-seqs: 2\nspeculative_config: {method: draft_model, max_depth: 2}\n")
    return str(path)


def test_the_constructor_reads_nothing(monkeypatch):
    monkeypatch.setenv("ROOTWARD_MAX_NUM_SEQS", "3")
    assert Settings(model="m").max_num_seqs == 8


def test_precedence(monkeypatch, yaml_file):
    monkeypatch.setenv("ROOTWARD_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("ROOTWARD_SPECULATIVE_CONFIG__MAX_DEPTH", "6")
    monkeypatch.setenv("ROOTWARD_CONFIG", yaml_file)
    settings = Settings.load([])
    assert (settings.model, settings.max_num_seqs) == ("from-file", 3)
    assert settings.speculative_config == Speculative(method="draft_model", max_depth=6)
    argv = ["--max-num-seqs", "4", "--no-stream", "--speculative-config", '{"max_depth": 7}']
    settings = Settings.load(argv)
    assert (settings.max_num_seqs, settings.stream) == (4, False)
    assert settings.speculative_config == Speculative(method="draft_model", max_depth=7)
    origin = Settings.explain(argv)
    assert origin["model"] == "file"
    assert origin["config"] == "environment"
    assert origin["stream"] == "command line"
    assert origin["peers"] == "default"


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2 ", '["a:1", "b:2"]'])
def test_lists_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("ROOTWARD_PEERS", text)
    assert Settings.load(["--model", "m"]).peers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model: is required; give --model, ROOTWARD_MODEL or a line in --config"),
        (["--modle", "m"], "--modle: unknown flag; did you mean --model?"),
        (["--model", "m", "--max-num", "3"], "--max-num: unknown flag; did you mean --max-num-seqs?"),
        (["--model", "m", "stray"], "stray: unexpected argument; see --help"),
        (["--model", "m", "--max-num-seqs", "0"], "max_num_seqs: '0' is not valid: input should be greater than or"),
        (["--model"], "argument --model: expected one argument; see --help"),
        (
            ["--model", "m", "--speculative-config", '{"depth": 1}'],
            "speculative_config.depth: unknown setting",
        ),
        (["--model", "m", "--key", "abc"], "key: (secret) is not valid: value should have at least 4 items"),
        (["--config", "/nowhere.yaml"], "config: '/nowhere.yaml' cannot be read"),
    ],
)
def test_errors_name_field_value_and_fix(argv, message):
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(argv)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["- a\n- b\n", "model: [", "modle: m\n"])
def test_files_that_cannot_be_used_are_refused(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"^(config|modle): "):
        Settings.load(["--config", str(path), "--model", "m"])


def test_broken_json_in_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("ROOTWARD_SPECULATIVE_CONFIG", "{broken")
    with pytest.raises(ConfigurationError, match="ROOTWARD_SPECULATIVE_CONFIG"):
        Settings.load(["--model", "m"])


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        Settings.load(["--help"], prog="rootward serve verifier")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: rootward serve verifier")
    assert "most sessions at once (default: 8)" in text
