"""Training of draft heads: the unrolled form equals drafting one token at a time, the loss has the gradient of its formula, files are as
published.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rootward import demo
from rootward.errors import ConfigurationError
from training import train_draft
from training.draft_head import WINDOW, DraftHead, _rotate
from training.overlap import overlap_loss

HIDDEN, LENGTH, STEPS = 16, 9, 4
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_aux_hidden_states": 3,
}


@pytest.fixture
def head() -> DraftHead:
    torch.manual_seed(0)
    head = DraftHead(CONFIG, torch.tensor([1, 4, 7])).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def drafted(head: DraftHead, states: torch.Tensor, embeddings: torch.Tensor, base: int) -> list[torch.Tensor]:
    """Outputs of a chain that begins at `base`, one token at a time with a cache: the reading that a server has of the format."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    keys, values, outputs = [], [], []
    current = None
    for t in range(base + STEPS):
        feature = head.fc(states[t]) if t <= base else current
        both = torch.cat([layer.input_layernorm(embeddings[t]), layer.hidden_norm(feature)])
        angle = t / 10000.0 ** (torch.arange(0, 4, 2).double() / 4)
        cos, sin = angle.cos(), angle.sin()
        query = _rotate(attention.q_proj(both).view(4, 4), cos, sin)
        keys.append(_rotate(attention.k_proj(both).view(2, 4), cos, sin))
        values.append(attention.v_proj(both).view(2, 4))
        seen = slice(-(head.config.get("sliding_window") or LENGTH), None)
        key, value = (torch.stack(x[seen]).repeat_interleave(2, 1) for x in (keys, values))
        weights = (torch.einsum("hd,thd->ht", query, key) / 2).softmax(-1)
        residual = feature + attention.o_proj(torch.einsum("ht,thd->hd", weights, value).flatten())
        current = residual + layer.mlp(layer.post_attention_layernorm(residual))
        if t >= base:
            outputs.append(head.norm(current))
    return outputs


@pytest.mark.parametrize("window", [None, 5])
def test_unrolled_steps_equal_drafting_one_token_at_a_time(head: DraftHead, window: int | None) -> None:
    kinds = ["full_attention"] if window is None else ["sliding_attention"]
    head.config = {**CONFIG, "layer_types": kinds, "sliding_window": window}
    states, embeddings = torch.randn(2, LENGTH, 3 * HIDDEN).double(), torch.randn(2, LENGTH, HIDDEN).double()
    answer = torch.zeros(2, LENGTH, dtype=torch.bool)
    answer[0, 2:] = True
    answer[1, 4:] = True
    steps = [
        torch.zeros(2, LENGTH, HIDDEN).double().masked_scatter(answer[..., None], out)
        for out in head.unroll(states, embeddings, answer, STEPS)
    ]
    for chat, first in ((0, 2), (1, 4)):
        for base in range(first, LENGTH - STEPS):
            for k, expected in enumerate(drafted(head, states[chat], embeddings[chat], base)):
                torch.testing.assert_close(steps[k][chat, base + k], expected)


@pytest.mark.parametrize("tv", [0.0, 0.7])
def test_loss_has_the_value_and_gradient_of_its_formula(tv: float) -> None:
    torch.manual_seed(1)
    drafts = torch.randn(2, 300, HIDDEN).double().requires_grad_()
    target, rows = torch.randn(300, HIDDEN).double(), torch.randn(11, HIDDEN).double()
    weights = (torch.rand(300) < 0.8).double()[None] * torch.tensor([[0.5], [0.2]]).double()
    loss, means = overlap_loss(drafts, target, rows, weights=weights, tv=tv)
    (gradient,) = torch.autograd.grad(loss, drafts)

    p, q = functional.linear(target, rows).softmax(-1), functional.linear(drafts, rows).softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    kl = (p * (p / q).log()).sum(-1)
    expected = (weights * (kl + tv * (1 - overlap))).sum()
    (expected_gradient,) = torch.autograd.grad(expected, drafts)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(means[0, 1], overlap[0][weights[0] > 0].mean())


def test_a_saved_head_is_read_back_with_its_inputs_scaled(head: DraftHead, tmp_path: Path) -> None:
    head.scale.uniform_(0.5, 2.0)
    head.save(tmp_path, vocabulary=9)
    read = DraftHead.load(tmp_path)
    assert read.draft_ids.tolist() == [1, 4, 7]
    states, embeddings = torch.randn(1, LENGTH, 3 * HIDDEN), torch.randn(1, LENGTH, HIDDEN)
    wanted = torch.ones(1, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = (
            torch.stack(list(one.unroll(states, embeddings, wanted, 2))) for one in (head.bfloat16().float(), read)
        )
    assert (ours - theirs).norm() / ours.norm() < 0.02, "weights are stored in bfloat16"


def test_unreadable_or_unfit_start_heads_are_refused(head: DraftHead, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    from training.train_draft import load_head

    with pytest.raises(ConfigurationError, match="--from-head"):
        load_head(tmp_path, HIDDEN)
    head.config["target_hidden_size"] = HIDDEN
    head.save(tmp_path, vocabulary=9)
    assert load_head(tmp_path, HIDDEN).draft_ids.tolist() == [1, 4, 7]
    with pytest.raises(ConfigurationError, match="hidden size 16, this one has 32"):
        load_head(tmp_path, 32)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigurationError, match="no head"):
        load_head(tmp_path, HIDDEN)


TARGET = str(demo.paths().target)
SMALL = [
    "--tokens",
    "40",
    "--slots",
    "16",  # the prompts of the report at a time
    "--answer-tokens",
    "8",
    "--unrolled",
    "1",
    "--device",
    "cpu",
    "--epochs",
    "1",
]


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The exit code of `rootward train-draft` with these flags."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    from training.train_draft import main

    monkeypatch.setattr(sys, "argv", ["train-draft", *flags])
    try:
        return main()
    except SystemExit as ended:  # of argparse
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/nowhere"], "target: '/nowhere' cannot be loaded"),
        ([TARGET, "--prompts", "/nowhere.jsonl"], "--prompts: '/nowhere.jsonl' cannot be read"),
        ([TARGET, "--prompts", "{folder}/lines.txt"], "--prompts: line 2 of"),
        ([TARGET, "--prompts", "{folder}/empty.jsonl"], "empty.jsonl' is empty"),
        ([TARGET, "--layers", "2", "3", "99"], "--layers: 2 3 99: use numbers from 0 to"),
        ([TARGET, "--tokens", "0"], "--tokens: '0': use a whole number above 0"),
        ([TARGET, "--slots", "0"], "--slots: '0': use a whole number above 0"),
        ([TARGET, "--draft-vocabulary", "-3"], "--draft-vocabulary: '-3': use a whole number above 0"),
        ([TARGET, "--minutes", "0"], "--minutes: '0': use a number above 0"),
        ([TARGET, "--epochs", "many"], "--epochs: 'many': use a number above 0"),
        ([TARGET, "--from-head", "/nowhere"], "--from-head: /nowhere has no head"),
        (["{folder}/plain"], "has no chat template"),
        (["/nowhere"], "target: '/nowhere' cannot be loaded (there is no such folder); name a folder"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text('{"text": "What is a tree?"}\nWhat is a root?\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    shutil.copytree(TARGET, tmp_path / "plain", ignore=shutil.ignore_patterns("*.jinja"))
    config = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    given = [flag.format(folder=tmp_path) for flag in flags]
    assert run(monkeypatch, *given, "--out", str(tmp_path / "head")) == 2
    told = capsys.readouterr().err
    assert words in told.replace("argument ", "")
    assert not (tmp_path / "head").exists()


def test_demo_is_the_shipped_target() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    from training.train_draft import arguments

    assert arguments(["demo", "--out", "head"]).target == demo.paths().target
    assert arguments([TARGET, "--out", "head"]).target == demo.paths().target


FORM = ["--draft-vocabulary", "64", "--layers", "1", "2", "3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in `head` and its prompts in `prompts.jsonl`, for tests that go on with its text or from its end."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "prompts.jsonl").write_text('{"text": "What is a tree?"}\n')
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(monkeypatch, TARGET, *files_of(folder), *SMALL, *FORM) == 0
    return folder


@pytest.fixture
def sampled(finished: Path, tmp_path: Path) -> Path:
    """A copy of it before its training."""
    shutil.copytree(finished, tmp_path / "sampled")
    (tmp_path / "sampled" / "head" / "work" / "checkpoint.pt").unlink()
    (tmp_path / "sampled" / "head" / "model.safetensors").unlink()
    return tmp_path / "sampled"


def files_of(folder: Path) -> list[str]:
    return ["--out", str(folder / "head"), "--prompts", str(folder / "prompts.jsonl")]


def test_a_run_goes_on_only_with_a_head_of_the_same_form(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other layers would fit its tensors, and another draft vocabulary would be ignored."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    flags = [TARGET, *files_of(folder), *SMALL]
    assert run(monkeypatch, *flags, *FORM) == 0
    capsys.readouterr()
    assert run(monkeypatch, *flags, "--draft-vocabulary", "64", "--layers", "0", "2", "3") == 2
    assert "--layers: 0 2 3, but the run that goes on here has 1 2 3" in capsys.readouterr().err
    assert run(monkeypatch, *flags, "--draft-vocabulary", "32", "--layers", "1", "2", "3") == 2
    assert "--draft-vocabulary: 32, but the run that goes on here has 64" in capsys.readouterr().err


def text_of(folder: Path) -> list[str]:
    from training.chat_store import ChatStore

    return sorted(f"{chat.temperature} {chat.ids[: chat.answer_start].tolist()}" for chat in ChatStore(folder)._chats)


def test_a_sampling_phase_that_was_interrupted_answers_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("training.train_draft")
    monkeypatch.setattr(module, "CHUNK_TOKENS", 1)
    write, written, budgets = module.write_chunk, [], []

    def write_some(path: Path, chats: list) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(len(chats))
        write(path, chats)

    class Budget(module.Budget):  # type: ignore[name-defined]  # of a module that may be missing
        def __init__(self, *args: float, **options: float) -> None:
            super().__init__(*args, **options)
            budgets.append(options.get("seconds_done", 0.0))

    flags = module.arguments([TARGET, "--out", str(tmp_path), *SMALL, "--slots", "1", "--sampling-minutes", "60"])
    target = module.load_target(flags)
    prompts = ["What is a tree?", "Hi", "What is a root?", "Hi"]
    module.sample(target, tmp_path / "whole", flags, prompts=prompts)
    monkeypatch.setattr(module, "Budget", Budget)
    monkeypatch.setattr(module, "write_chunk", write_some)
    with pytest.raises(KeyboardInterrupt):
        module.sample(target, tmp_path / "cut", flags, prompts=prompts)
    monkeypatch.setattr(module, "write_chunk", write)
    assert len(text_of(tmp_path / "cut")) == sum(written)
    module.sample(target, tmp_path / "cut", flags, prompts=prompts)
    assert text_of(tmp_path / "cut") == text_of(tmp_path / "whole")
    assert len(text_of(tmp_path / "cut")) == 2 * len(prompts)
    assert budgets[0] == 0
    assert budgets[1] > 0


def test_a_work_folder_of_another_target_or_other_prompts_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    flags = [*files_of(folder), *SMALL, *FORM]
    shutil.copytree(TARGET, tmp_path / "moved")
    assert run(monkeypatch, str(tmp_path / "moved"), *flags) == 0
    capsys.readouterr()
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"text": "What is a root?"}\n')
    assert run(monkeypatch, TARGET, *flags) == 2
    assert f"--prompts: '{prompts}', but the text that is used here" in capsys.readouterr().err
    shutil.copy(finished / "prompts.jsonl", prompts)
    config = json.loads((tmp_path / "moved" / "config.json").read_text(encoding="utf-8"))
    config["rms_norm_eps"] *= 2
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(monkeypatch, str(tmp_path / "moved"), *flags) == 2
    assert "moved', but the text that is used here" in capsys.readouterr().err


def test_a_text_without_held_out_chats_is_trained_on(sampled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small one none may be: that must not end training at its first checkpoint."""
    module = pytest.importorskip("training.train_draft")
    monkeypatch.setattr(module, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(module, "HELD_OUT_SHARE", 0.0)
    assert run(monkeypatch, TARGET, *files_of(sampled), *SMALL, *FORM) == 0
    assert (sampled / "head" / "model.safetensors").is_file()
    assert json.loads((sampled / "head" / "config.json").read_text(encoding="utf-8"))["sliding_window"] == WINDOW


def test_a_text_without_chats_for_training_is_refused(
    sampled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = pytest.importorskip("training.train_draft")
    monkeypatch.setattr(module, "HELD_OUT_SHARE", 1.0)
    assert run(monkeypatch, TARGET, *files_of(sampled), *SMALL, *FORM) == 2
    assert "--tokens: 40 are too few" in capsys.readouterr().err


def test_an_interrupted_run_says_that_the_same_command_goes_on(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_draft, "run_phases", interrupted)
    assert train_draft.main(["target", "--out", "out"]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
