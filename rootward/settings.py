"""Settings of every service: command line > environment > YAML file > defaults. The only reader of the environment. And the settings that
every service has: certificates, probes, logs, traces.

A service subclasses `ServiceSettings` and starts with `settings = VerifierSettings.load(argv)`. Field `max_num_seqs` is flag
`--max-num-seqs`, variable `ROOTWARD_MAX_NUM_SEQS` and key `max_num_seqs` of the file named by `--config`. The constructor itself
reads nothing: `VerifierSettings(model="x")` is exactly that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rootward.demo import draft_named, target_named
from rootward.errors import ConfigurationError
from rootward.redis_client import KEY_PREFIX
from rootward.wire.tls import Certificates, ClientTls, ServerTls

PREFIX = "ROOTWARD_"

Values = dict[str, Any]


def _split(value: object) -> object:
    """One string with commas, or a list of such."""
    parts = value if isinstance(value, list) else [value]
    return [item.strip() for part in parts for item in str(part).split(",") if item.strip()]


CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split)]  # a list that people write with commas


def _listen_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write host:port; port 0 takes a free one")
    return value


ListenAddress = Annotated[str, AfterValidator(_listen_address)]
TargetSpec = Annotated[str, AfterValidator(target_named)]  # a model that the name demo may stand for
DraftSpec = Annotated[str, AfterValidator(draft_named)]
OptionalListenAddress = Annotated[str, AfterValidator(lambda value: value and _listen_address(value))]


class ServiceSettings(BaseSettings):
    """Base class; see the module."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
    )

    config: Path | None = Field(None, description="YAML file with settings")

    @classmethod
    def load(cls, argv: Sequence[str] | None = None, *, prog: str | None = None) -> Self:
        """Settings from all sources (argv None = the command line of the process).

        ConfigurationError (exit code 2) names field, value and fix in one line. `--help` prints and exits.
        """
        source = cls._source(prog)
        try:
            command_line: Values = dict(source(args=list(sys.argv[1:] if argv is None else argv))())
        except SettingsError as error:
            raise ConfigurationError(_explain_flags(str(error), source.root_parser)) from None
        try:
            environment = EnvSettingsSource(cls)()
        except SettingsError as error:  # whose message has the name of the field alone
            name = re.search(r'field "(\w+)"', str(error))
            field = name[1] if name else "environment"
            raise ConfigurationError(f"{field}: {PREFIX}{field.upper()} is not JSON; correct it") from None
        path = command_line.get("config") or environment.get("config")
        try:
            return cls(**((_file(Path(path)) if path else {}) | environment | command_line))
        except ValidationError as error:
            raise ConfigurationError("; ".join(_explain(cls, e) for e in error.errors())) from None

    @classmethod
    def parser(cls) -> Any:
        """The argparse parser of the command line, for the completion of shells."""
        return cls._source(None).root_parser

    @classmethod
    def _source(cls, prog: str | None) -> CliSettingsSource[Any]:
        source: CliSettingsSource[Any] = CliSettingsSource(cls, cli_prog_name=prog)
        source.root_parser.allow_abbrev = False  # `--max` must not mean `--max-model-len` today and nothing tomorrow
        for action in source.root_parser._actions:
            action.help = _with_one_default(action.help or "")
        return source

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _with_one_default(text: str) -> str:
    """The help of a flag without the default that pydantic adds, if that says nothing, or the description names the default in words."""
    words, _, added = text.rpartition("(default: ")
    return words.rstrip() if added in (")", "null)") or "(default: " in words else text


class ProcessSettings(ServiceSettings):
    """Base class of the settings of the three services.

    Without certificates everything travels in the clear: for one machine, or a network that encrypts.
    """

    admin_listen: OptionalListenAddress = Field("", description="HTTP address of probes and metrics (default: none)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_json: bool = Field(False, description="log as JSON lines")
    tracing_endpoint: str = Field("", description="OTLP over gRPC, as http://host:4317 (default: no traces)")
    tracing_share: float = Field(1.0, ge=0, le=1, description="share of requests traced that no caller has decided on")
    redis_prefix: str = Field(
        KEY_PREFIX,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="first part of all keys in Redis; installations that share one Redis need different ones",
    )
    tls_certificate: Path | None = Field(None, description="PEM file of this role's certificate chain; turns TLS on")
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_authority: Path | None = Field(None, description="PEM file of the authority that signs the other roles")
    tls_server_name: str = Field("", description="name in the certificates of services called (default: their host)")
    tls_peers: CommaSeparated = Field(
        default=[], description="names in the certificates of callers admitted, with commas between"
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(files) and not all(files):
            raise ValueError("give tls_certificate, tls_key and tls_authority together, or none of them")
        if not any(files) and (self.tls_peers or self.tls_server_name):
            raise ValueError("tls_peers and tls_server_name need tls_certificate, tls_key and tls_authority")
        return self

    @property
    def certificates(self) -> Certificates | None:
        """This role's files, None without TLS."""
        if self.tls_certificate is None or self.tls_key is None or self.tls_authority is None:
            return None
        return Certificates(self.tls_certificate, self.tls_key, self.tls_authority)

    @property
    def client_tls(self) -> ClientTls | None:
        """TLS of this role as a client."""
        return ClientTls(files, self.tls_server_name) if (files := self.certificates) else None

    @property
    def server_tls(self) -> ServerTls | None:
        """TLS of this role as a server: other services need a certificate of the authority."""
        return ServerTls(files, peers=tuple(self.tls_peers)) if (files := self.certificates) else None


class WorkerSettings(ProcessSettings):
    """Settings that verifier and drafter have in common: the model's device, and the address that peers use."""

    advertise: str = Field("", description="host:port that peers dial (default: the one it listens on)")
    zone: str = Field("", description="where it runs: near peers are tried first")
    device: str = Field("cpu", description="torch device")
    cuda_graphs: bool = Field(False, description="record forwards as CUDA graphs")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "auto",
        description="weights and arithmetic; auto: the checkpoint's; float32 on CPUs without bfloat16, except for the Llama family",
    )
    max_model_len: int | None = Field(None, ge=1, description="context in tokens (default: the model's, at most 8192)")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the model (default: all cores; drafters of `serve all` have fewer)"
    )


def _file(path: Path) -> Values:
    """The mapping in a YAML file; dashes in its keys mean underscores, as in vLLM's files."""
    import yaml  # type: ignore[import-untyped]  # only needed with --config

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config: {str(path)!r} cannot be read ({error}); name a readable file") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"config: {str(path)!r} is not YAML ({_one_line(error)})") from None
    if not isinstance(content or {}, dict):
        raise ConfigurationError(f"config: {str(path)!r} is not a mapping; write one 'name: value' per line")
    return {str(key).replace("-", "_"): value for key, value in (content or {}).items()}


def _explain(settings: type[ServiceSettings], error: ErrorDetails) -> str:
    """One line: field, value, fix."""
    if not error["loc"]:  # about several fields, which the message names; their values may be secrets
        return _one_line(error["msg"].removeprefix("Value error, "))
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{name}: is required; give --{name.replace('_', '-')}, {PREFIX}{name.upper()} or a line in --config"
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting{_suggestion(name, list(settings.model_fields))}"
    message = _one_line(error["msg"].removeprefix("Value error, "))
    secret = name in settings.model_fields and "Secret" in str(settings.model_fields[name].annotation)
    value = "(secret)" if secret else repr(error["input"])
    return f"{name}: {value} is not valid: {message[:1].lower()}{message[1:]}"


def _explain_flags(message: str, parser: Any) -> str:
    """argparse's complaint, with the closest known flag for one that does not exist."""
    message = _one_line(message).removeprefix("error parsing CLI: ")
    unknown = re.search(r"unrecognized arguments: (\S+)", message)
    if not unknown:
        return f"{message}; see --help"
    flag = unknown[1].partition("=")[0]
    if not flag.startswith("-"):
        return f"{flag}: unexpected argument; see --help"
    known = [option for action in parser._actions for option in action.option_strings]
    return f"{flag}: unknown flag{_suggestion(flag, known)}"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; see --help"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
