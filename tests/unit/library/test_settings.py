"""Settings of a service: precedence of their sources, one-line errors that name the fix, help text."""

from __future__ import annotations

import pytest
from pydantic import Field, SecretStr

from rootward.errors import ConfigurationError
from rootward.settings import CommaSeparated, ListenAddress, OptionalListenAddress, ServiceSettings


class Settings(ServiceSettings):
    """Runs a service."""

    model: str = Field(description="folder or name of the model")
    max_num_seqs: int = Field(8, ge=1, description="most sessions at once")
    stream: bool = Field(True, description="send tokens as they come")
    peers: CommaSeparated = Field([])
    key: SecretStr | None = Field(None, min_length=4)
    listen: ListenAddress = Field("127.0.0.1:1")
    admin_listen: OptionalListenAddress = Field("")


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: from-file\nmax-num-seqs: 2\n")
    return str(path)


def test_the_constructor_ignores_environment_and_files(monkeypatch):
    monkeypatch.setenv("ROOTWARD_MAX_NUM_SEQS", "3")
    assert Settings(model="m").max_num_seqs == 8


def test_flags_override_environment_variables_which_override_the_file(monkeypatch, yaml_file):
    monkeypatch.setenv("ROOTWARD_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("ROOTWARD_CONFIG", yaml_file)
    settings = Settings.load([])
    assert (settings.model, settings.max_num_seqs) == ("from-file", 3)
    settings = Settings.load(["--max-num-seqs", "4", "--no-stream"])
    assert (settings.model, settings.max_num_seqs, settings.stream) == ("from-file", 4, False)


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2 "])
def test_comma_separated_lists_from_environment_and_flags(monkeypatch, text):
    monkeypatch.setenv("ROOTWARD_PEERS", text)
    assert Settings.load(["--model", "m"]).peers == ["a:1", "b:2"]
    assert Settings.load(["--model", "m", "--peers", text]).peers == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model: is required; give --model, ROOTWARD_MODEL or a line in --config"),
        (["--modle", "m"], "--modle: unknown flag; did you mean --model?"),
        (["--model", "m", "--max-num", "3"], "--max-num: unknown flag; did you mean --max-num-seqs?"),
        (["--model", "m", "stray"], "stray: unexpected argument; see --help"),
        (["--model", "m", "--max-num-seqs", "0"], "max_num_seqs: '0' is not valid: input should be greater than or"),
        (["--model"], "argument --model: expected one argument; see --help"),
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


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:x", ":1", "a:65536", "dns:///a:1", "unix:/a/b:1"])
@pytest.mark.parametrize("setting", ["listen", "admin_listen"])
def test_an_address_to_listen_on_is_a_host_and_a_port(setting, address):
    with pytest.raises(ConfigurationError, match=f"{setting}: '{address}' is not valid: write host:port; port 0"):
        Settings.load(["--model", "m", f"--{setting.replace('_', '-')}", address])


def test_an_optional_address_may_be_empty():
    fits = ["--model", "m", "--listen", "[::]:0"]
    assert Settings.load([*fits, "--admin-listen", ""]).admin_listen == ""
    assert Settings.load([*fits, "--admin-listen", "a:65535"]).admin_listen == "a:65535"


@pytest.mark.parametrize("text", ["- a\n- b\n", "model: [", "modle: m\n"])
def test_malformed_files_and_unknown_settings_in_them_are_refused(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"^(config|modle): "):
        Settings.load(["--config", str(path), "--model", "m"])


def test_a_list_in_the_environment_that_is_no_json_is_refused_by_name(monkeypatch):
    from gateway.settings import GatewaySettings

    monkeypatch.setenv("ROOTWARD_MODELS", "[{")
    with pytest.raises(ConfigurationError, match=r"^models: ROOTWARD_MODELS is not JSON"):
        GatewaySettings.load([])


def test_help_shows_descriptions_and_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        Settings.load(["--help"], prog="rootward serve verifier")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: rootward serve verifier")
    assert "most sessions at once (default: 8)" in text


def test_help_names_one_default_of_a_flag(capsys):
    class Described(Settings):
        threads: int | None = Field(None, description="threads (default: all cores)")
        places: bool = Field(False, description="places of texts (default: as the model says)")
        name: str = Field("", description="a name")

    with pytest.raises(SystemExit):
        Described.load(["--help"], prog="x")
    text = " ".join(capsys.readouterr().out.split())
    assert "threads (default: all cores) --places" in text
    assert "places of texts (default: as the model says) --name" in text
    assert "(default: null)" not in text
    assert "(default: )" not in text
