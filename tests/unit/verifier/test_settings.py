"""Settings that no drafter would serve are refused at start."""

from __future__ import annotations

import pytest

import rootward.engine.grower
from rootward.errors import ConfigurationError
from verifier_service.settings import MAX_NODES, VerifierSettings


def test_trees_are_no_larger_than_drafters_grow_them() -> None:
    """A drafter refuses a larger one for good: the service would decode plainly and nobody would know why."""
    assert MAX_NODES == rootward.engine.grower.MAX_NODES
    fits = ["--model", "m", "--num-draft-tokens", "64", "--num-ahead-tokens", "176"]
    assert VerifierSettings.load(fits).shape.ahead == 176
    assert VerifierSettings.load(["--model", "m", "--num-draft-tokens", "220"]).shape.ahead == 20
    with pytest.raises(ConfigurationError, match=r"num_ahead_tokens.*num_draft_tokens 65.*240"):
        VerifierSettings.load([*fits, "--num-draft-tokens", "65"])


def test_one_head_serves_local_trees_and_drafters() -> None:
    of = VerifierSettings.load
    assert of(["--model", "m", "--local-draft", "head:a"]).head_folder == "a"
    assert of(["--model", "m", "--draft-head", "b"]).head_folder == "b"
    assert of(["--model", "m", "--local-draft", "head:a", "--draft-head", "a"]).head_folder == "a"
    assert of(["--model", "m"]).head_folder == ""
    with pytest.raises(ConfigurationError, match=r"draft_head.*local_draft is head:a"):
        of(["--model", "m", "--local-draft", "head:a", "--draft-head", "b"])


def test_no_window_is_larger_than_drafters_read_it() -> None:
    window = VerifierSettings.model_fields["feature_window"].metadata
    assert [bound.le for bound in window if hasattr(bound, "le")] == [rootward.engine.grower.MAX_FEATURES]
