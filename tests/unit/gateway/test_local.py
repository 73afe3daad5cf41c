"""`serve all`: the command lines of the processes, for every way to name a model."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.certificates import Authority

from drafter_service.settings import DrafterSettings
from gateway import local
from gateway.local import Child, _deployment, serve_all
from gateway.settings import GatewaySettings, LocalSettings
from rootward import demo
from rootward.demo import paths
from rootward.engine import gguf_files
from rootward.errors import ConfigurationError, Unavailable
from rootward.ports import ModelInfo, VerifierInfo
from rootward.wire.tls import ClientTls
from verifier_service.settings import VerifierSettings


def started(*flags: str) -> tuple[GatewaySettings, VerifierSettings, list[DrafterSettings]]:
    """What the processes make of their command lines."""
    deployment = _deployment(LocalSettings.load(["--redis-url", "none", *flags]), "/tmp", reserved=ExitStack())
    gateway, verifier, *drafters = (child.command[3:] for child in deployment.services)
    found = [DrafterSettings.load(flags) for flags in drafters]
    return GatewaySettings.load(gateway), VerifierSettings.load(verifier), found


@pytest.mark.parametrize("flags", [(), ("--model", "demo")])
def test_the_shipped_pair_is_the_default_without_a_download(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gateway, verifier, drafters = started(*flags)
    assert (gateway.model, verifier.model) == (str(paths().target),) * 2
    assert [(one.model, one.target_tokenizer) for one in drafters] == [(str(paths().draft), str(paths().target))]
    assert gateway.served[0].name == "target"


def test_smollm2_with_its_head_is_the_default_once_it_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "_convert", lambda file, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo.smollm2().parent.mkdir(parents=True)
    demo.smollm2().write_bytes(b"GGUF")
    gateway, verifier, drafters = started("--verifier-flags", "--max-num-seqs 3")
    assert gateway.served[0].name == verifier.name == "SmolLM2-135M-Instruct"
    assert (verifier.local_draft, verifier.max_num_seqs, drafters) == (f"head:{demo.smollm2_head()}", 3, [])
    assert started("--model", "demo")[1].model == str(paths().target)
    assert len(started("--num-drafters", "2")[2]) == 2
    gateway, verifier, (drafter,) = started("--draft-model", "owner/draft")
    assert (verifier.model, drafter.model) == (str(paths().target), "owner/draft")
    assert len(started("--drafter-flags", "--max-num-seqs 3")[2]) == 1


def test_demo_is_the_shipped_pair_for_each_service_alone() -> None:
    target = str(paths().target)
    flags = ["--model", "demo"]
    assert (GatewaySettings.load(flags).model, VerifierSettings.load(flags).model) == (target, target)
    listed = ["--models", '[{"model": "demo", "verifiers": ["127.0.0.1:1"]}]']
    assert GatewaySettings.load(listed).served[0].model == target
    drafter = DrafterSettings.load([*flags, "--target-tokenizer", "demo"])
    assert (drafter.model, drafter.target_tokenizer) == (str(paths().draft), target)
    assert DrafterSettings.load(["--model", "head:x", "--target", "demo"]).target == target


def test_demo_as_a_draft_model_is_the_shipped_one() -> None:
    _, _, (drafter,) = started("--model", "owner/name", "--draft-model", "demo")
    assert drafter.model == str(paths().draft)


def test_the_certificates_of_the_gateway_are_those_of_all_and_its_probes_are_on_a_port_without_tls(
    tmp_path: Path,
) -> None:
    files = Authority(tmp_path).issue("gateway")
    tls = f"--tls-certificate {files.certificate} --tls-key {files.key} --tls-authority {files.authority}"
    flags = ("--model", "demo", "--gateway-flags", f"{tls} --tls-server-name localhost")
    gateway, verifier, (drafter,) = started(*flags)
    assert gateway.admin_listen.startswith("127.0.0.1:")
    assert [one.certificates for one in (gateway, verifier, drafter)] == [files] * 3
    assert (verifier.tls_server_name, drafter.tls_server_name) == ("localhost", "localhost")
    assert started(*flags, "--verifier-flags", "--tls-server-name other")[1].tls_server_name == "other"
    assert started("--model", "demo")[0].admin_listen == ""


@pytest.mark.parametrize("closed_by", ["keys", "tls"])
async def test_the_drafters_are_waited_for_behind_a_gateway_that_wants_credentials(
    closed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Verifier:
        """Has found its drafter when it is asked for the third time."""

        def __init__(self, address: str, *, tls: ClientTls | None, rpc_timeout_s: float):
            assert (tls is not None) == (closed_by == "tls")

        async def __aenter__(self) -> Verifier:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def get_info(self) -> VerifierInfo:
            asked.append(True)
            if len(asked) == 1:
                raise Unavailable("not yet")
            return VerifierInfo(ModelInfo("m", 5, 64), drafters=("127.0.0.1:1",) if len(asked) > 2 else ())

    files = Authority(tmp_path).issue("gateway")
    tls = f"--tls-certificate {files.certificate} --tls-key {files.key} --tls-authority {files.authority}"
    flags = ["--redis-url", "none", "--model", "demo", "--gateway-flags"]
    with ExitStack() as reserved:
        settings = LocalSettings.load([*flags, tls if closed_by == "tls" else "--api-keys keys.yaml"])
        deployment = _deployment(settings, "/tmp", reserved=reserved)
        deployment.gateway.address = "127.0.0.1:1 and http://127.0.0.1:2"
        monkeypatch.setattr(local, "_has_verifier", lambda url: url.startswith("http://127.0.0.1:"))
        monkeypatch.setattr(local, "RemoteVerifier", Verifier)
        monkeypatch.setattr(local, "ASK_EVERY_S", 0.0)
        await local._connected(deployment)
    assert len(asked) == 3


@pytest.mark.parametrize("flag", ["--listen", "--http-listen"])
async def test_a_port_that_is_taken_is_named_before_any_process_starts(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ports = {"--listen": "127.0.0.1:0", "--http-listen": "127.0.0.1:0"} | {flag: address}
        words = [word for pair in ports.items() for word in pair]
        with pytest.raises(
            ConfigurationError, match=f"^{flag}: '{address}' cannot be bound .*; choose another address"
        ):
            async with serve_all(LocalSettings.load(["--model", "tabular:vocab=5", "--redis-url", "none", *words])):
                pass


OF_OTHERS = "redis://:secret@127.0.0.1:1/0"


@pytest.mark.parametrize("name", ["ROOTWARD_REDIS_URL", "rootward_redis_url"])
@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (["--redis-url", "none"], ""),
        (["--redis-url", "redis://:own@127.0.0.1:2/0"], "redis://:own@127.0.0.1:2/0"),
        ([], OF_OTHERS),
    ],
    ids=["none", "flag", "variable"],
)
def test_the_gateway_alone_is_told_the_redis_and_not_by_its_command_line(
    name: str, flags: list[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, OF_OTHERS)
    with ExitStack() as reserved:
        deployment = _deployment(LocalSettings.load(["--model", "demo", *flags]), "/tmp", reserved=reserved)
    assert deployment.settings.redis_url == url
    assert deployment.redis is None
    told = []
    for child in deployment.children:
        assert not any("redis" in word for word in child.command)
        assert child.environment is not None
        told.append({key: value for key, value in child.environment.items() if key.upper() == "ROOTWARD_REDIS_URL"})
    assert told == [{"ROOTWARD_REDIS_URL": url}, {}, {}]


def test_a_variable_of_none_keeps_sessions_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTWARD_REDIS_URL", "none")
    with ExitStack() as reserved:
        deployment = _deployment(LocalSettings.load(["--model", "demo"]), "/tmp", reserved=reserved)
    assert (deployment.redis, deployment.settings.redis_url) == (None, "")
    environments = [child.environment for child in deployment.services]
    assert [one and one.get("ROOTWARD_REDIS_URL") for one in environments] == ["", None, None]


def test_a_scaler_without_redis_is_refused_unless_a_flag_of_the_gateway_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROOTWARD_REDIS_URL", OF_OTHERS)
    flags = ["--model", "demo", "--redis-url", "none", "--gateway-flags"]
    with ExitStack() as reserved:
        with pytest.raises(ConfigurationError, match="scaler_listen needs redis_url"):
            _deployment(LocalSettings.load([*flags, "--scaler-listen 127.0.0.1:4"]), "/tmp", reserved=reserved)
        own = "--scaler-listen 127.0.0.1:4 --redis-url redis://127.0.0.1:3/0"
        deployment = _deployment(LocalSettings.load([*flags, own]), "/tmp", reserved=reserved)
    assert deployment.settings.redis_url == "redis://127.0.0.1:3/0"


async def test_a_process_has_the_environment_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTWARD_REDIS_URL", OF_OTHERS)
    program = "import os, time; print('x listening on', sorted(os.environ.items()), flush=True); time.sleep(600)"
    child = Child("one", [sys.executable, "-c", program], environment={"LC_CTYPE": "C.UTF-8", "ONE": "1"})
    running = asyncio.create_task(child.run())
    try:
        async with asyncio.timeout(60):
            await child.ready.wait()
        assert child.address == "[('LC_CTYPE', 'C.UTF-8'), ('ONE', '1')]"
    finally:
        child.kill()
        await running


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_process_that_is_told_to_end_while_it_starts_does_not_stay(how: str) -> None:
    """Otherwise the deployment waits for it without end."""
    child = Child("one", [sys.executable, "-c", "import time; time.sleep(600)"])
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)
    assert child.pid == 0
    if how == "stop":
        await child.stop(1.0)
    else:
        child.kill()
    ended, _ = await asyncio.wait({running}, timeout=60)
    child.kill()
    await running
    assert ended


@pytest.mark.parametrize(("threads", "drafters", "of_each"), [(2, 1, 1), (8, 1, 4), (8, 2, 2), (1, 3, 1)])
def test_the_target_has_all_threads_and_drafters_share_half_as_many(threads: int, drafters: int, of_each: int) -> None:
    flags = ("--model", "demo", "--num-threads", str(threads), "--num-drafters", str(drafters))
    _, verifier, found = started(*flags)
    assert verifier.num_threads == threads
    assert [one.num_threads for one in found] == [of_each] * drafters


def test_drafters_of_heads_share_all_threads() -> None:
    """They work only while the target waits."""
    flags = ["--redis-url", "none", "--model", "owner/name", "--draft-model", "head:/heads/one", "--num-threads", "4"]
    deployment = _deployment(LocalSettings.load([*flags, "--num-drafters", "2"]), "/tmp", reserved=ExitStack())
    for drafter in deployment.drafters:
        command = drafter.command
        assert command[command.index("--num-threads") + 1] == "2"


def test_drafters_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--num-drafters: drafters need a model"):
        started("--model", "owner/name", "--num-drafters", "2")
    assert started("--model", "owner/name", "--num-drafters", "0")[2] == []


def test_a_model_without_a_draft_model_drafts_from_its_text() -> None:
    _, verifier, drafters = started("--model", "owner/name")
    assert (verifier.drafters, drafters) == ([], [])


@pytest.mark.parametrize("model", ["/models/Some-Model", "owner/Some-Model"])
def test_folders_and_hub_names_are_served_under_their_last_part(model: str) -> None:
    gateway, verifier, drafters = started("--model", model, "--draft-model", "owner/draft", "--num-drafters", "2")
    assert (gateway.model, verifier.model) == (model, model)
    assert [(one.model, one.target_tokenizer) for one in drafters] == [("owner/draft", model)] * 2
    assert gateway.served[0].name == verifier.name == "Some-Model"


def test_a_gguf_file_is_served_under_its_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_convert", lambda file, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "Some-Model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    converted = gguf_files.local_model(str(file))
    gateway, verifier, drafters = started("--model", str(file), "--draft-model", "none")
    assert (gateway.model, verifier.model, drafters) == (converted, converted, [])
    assert gateway.served[0].name == verifier.name == "Some-Model.Q8_0"
    gateway, verifier, _ = started("--model", str(file), "--draft-model", "none", "--served-model-name", "mine")
    assert gateway.served[0].name == verifier.name == "mine"
    with pytest.raises(ConfigurationError, match="no file at"):
        started("--model", str(tmp_path / "other.gguf"))


def test_without_a_draft_model_the_verifier_keeps_its_own_drafts() -> None:
    _, verifier, drafters = started("--model", "owner/name", "--draft-model", "none")
    assert drafters == []
    assert (verifier.drafters, verifier.local_draft) == ([], VerifierSettings(model="x").local_draft)


async def test_a_gguf_draft_with_another_tokenizer_drafts_in_the_vocabulary_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter_service.__main__ import load
    from rootward.engine.other_vocabulary import TranslatedModel

    def convert(_: Path, folder: Path) -> None:
        shutil.copytree(paths().draft, folder, dirs_exist_ok=True)
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        rarest, second = sorted(vocab, key=vocab.__getitem__)[-2:]
        vocab[rarest], vocab[second] = vocab[second], vocab[rarest]
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")

    monkeypatch.setattr(gguf_files, "_convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF")
    _, _, (drafter,) = started("--draft-model", str(file))
    assert isinstance(await load(drafter), TranslatedModel)
