"""Settings of the drafter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rootward.core.requests import STRATEGIES, DraftStrategy
from rootward.ports import DEFAULT_POOL
from rootward.settings import DraftSpec, ListenAddress, TargetSpec, WorkerSettings


class DrafterSettings(WorkerSettings):
    """Rootward drafter: grows token trees for verifiers with a small model, or without one."""

    model: DraftSpec = Field(
        description="Hugging Face folder or hub name of the draft model; demo, the shipped one; or tabular:vocab=…,seed=…; "
        "head:FOLDER, a draft head of the target; without a model: ngram:, recycling: or ngram+recycling:"
    )
    target: TargetSpec = Field(
        "",
        description="folder or hub name of the target of a draft head, which the model then is: the target's embedding and output rows "
        "are read, and its tokenizer",
    )
    feature_dtype: Literal["bfloat16", "int8"] = Field(
        "bfloat16",
        description="what verifiers send to a draft head: bfloat16, or int8 with a scale per position, half the bytes",
    )
    target_tokenizer: TargetSpec = Field(
        "",
        description="folder or hub name of the target, for a draft model with another tokenizer: it then drafts the tokens "
        "that both have (default: the draft model has the target's tokenizer)",
    )
    listen: ListenAddress = Field("127.0.0.1:50061", description="gRPC address; port 0 takes a free one")
    pool: str = Field(
        DEFAULT_POOL, min_length=1, description="name of the pool it belongs to, in the registry and in metrics"
    )
    redis_url: str = Field(
        "", description="redis://host:port/0 of the registry where verifiers find it (default: none)"
    )
    max_num_seqs: int = Field(16, ge=1, description="trees held at once, over all verifiers")
    max_num_batched_tokens: int = Field(256, ge=1, description="rows of one draft forward")
    law_atoms: int = Field(64, ge=1, le=4096, description="largest support of a declared row (K)")
    draft_strategy: str = Field(
        "best_first",
        description=f"trees that it grows when a request does not say: {', '.join(STRATEGIES)}",
    )
    draws_per_level: int = Field(4, ge=1, description="most nodes drawn for a tree after each draft forward")
    acceptance: float = Field(
        0.7, gt=0, lt=1, description="assumed acceptance of a first child: higher grows deeper, lower wider"
    )
    later_acceptance: float = Field(0.2, gt=0, lt=1, description="the same of its later siblings, once it has failed")
    shutdown_timeout_s: float = Field(
        30.0, ge=0, description="how long SIGTERM waits for verifiers to move their sessions"
    )

    @field_validator("draft_strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        return str(DraftStrategy.parse(value))
