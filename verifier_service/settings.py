"""Settings of the verifier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rootward.core.requests import DraftMode, Speculation
from rootward.discovery.sources import SourceList
from rootward.settings import CommaSeparated, ListenAddress, TargetSpec, WorkerSettings

MAX_NODES = 240  # of one session at a drafter, growth ahead included: it refuses more
MAX_AHEAD = 192  # of them for the rounds after the next, and the default
HEAD = "head:"  # and the folder of a draft head, in `local_draft`


@dataclass(frozen=True, slots=True)
class Shape:
    """Limits of a draft tree. atoms: K; ahead: nodes for rounds after the next, by drafters on other machines and on this one."""

    atoms: int
    node_cap: int
    max_depth: int
    topk: int
    ahead: int = 0
    ahead_on_loopback: int = 0

    def within(self, wish: Speculation) -> Shape:
        """These limits, or lower ones that a request asks for."""
        return replace(
            self,
            node_cap=min(self.node_cap, wish.num_draft_tokens or self.node_cap),
            max_depth=min(self.max_depth, wish.max_depth or self.max_depth),
            topk=min(self.topk, wish.topk or self.topk),
        )


class VerifierSettings(WorkerSettings):
    """Rootward verifier: runs the target model and owns every committed token."""

    model: TargetSpec = Field(
        description="Hugging Face folder, GGUF file or hub name of the target model; demo, the shipped one; or tabular:vocab=…,seed=…"
    )
    listen: ListenAddress = Field("127.0.0.1:50052", description="gRPC address; port 0 takes a free one")
    metrics_compat: Literal["none", "vllm"] = Field(
        "none", description="export metrics of the same meaning under vLLM's names as well"
    )
    drafters: SourceList = Field(
        default=[],
        description="where drafters are, with commas between: host:port, dns:name:port, redis:[pool], "
        "kubernetes:service[.namespace][:port]; before each POOL= if there are several; none: drafts of local_draft alone",
    )
    untrusted_pools: CommaSeparated = Field(
        default=[],
        description="pools whose drafters are verified by match only, with commas between; drafters of all others are audited",
    )
    redis_url: str = Field(
        "", description="redis://host:port/0 of the registry, to be found there and to find drafters (default: neither)"
    )
    served_model_name: str = Field(
        "", description="name under which gateways find it (default: the last part of --model)"
    )
    target_adapter: str | None = Field(None, description="folder with a LoRA adapter of the target; the draft has none")
    quantization: str | None = Field(
        None, description="JSON of a transformers quantization_config (default: what the checkpoint says)"
    )
    tensor_parallel: int = Field(1, ge=1, description="processes that share the model, one GPU each")
    nnodes: int = Field(
        1, ge=1, description="machines over which these processes are spread evenly, a verifier process on each"
    )
    node_rank: int = Field(0, ge=0, description="which of the machines this is; 0 serves, the others compute for it")
    master_addr: str = Field(
        "127.0.0.1", min_length=1, description="host of machine 0, where processes find each other"
    )
    master_port: int = Field(
        0, ge=0, le=65535, description="its port for that, the same on all machines (one machine: a free one)"
    )
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="KV memory of all sessions, in tokens (default: max_num_seqs of the longest)"
    )
    max_num_seqs: int = Field(16, ge=1, description="sessions that run at once")
    max_num_batched_tokens: int = Field(256, ge=2, description="rows of one target forward")
    max_num_queued_reqs: int = Field(256, ge=1, description="requests that may wait for a place")
    law: DraftMode = Field(DraftMode.GREEDY, description="how drafters make children when a request does not say")
    law_atoms: int = Field(64, ge=1, le=4096, description="support of a draft law (K)")
    num_draft_tokens: int = Field(16, ge=1, le=MAX_NODES, description="most nodes verified in a round, root excluded")
    max_depth: int = Field(8, ge=1, description="longest drafted path")
    topk: int = Field(4, ge=1, description="most children of a node")
    num_ahead_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_AHEAD,
        description="nodes that drafters grow for the rounds after the next while they would be idle, shared by the sessions of a "
        "drafter; 0: none (default: 192, and none for drafters at a loopback address, who compute on the target's own processors)",
    )
    local_draft: str = Field(
        "ngram",
        pattern=r"^(none|ngram|recycling|ngram\+recycling|head:.+)$",
        description="trees for sessions that no drafter grows one for, where that pays: looked up in their text (ngram) or in what "
        "followed each token lately (recycling), or grown by a draft head of the target beside ngram (head:FOLDER); one of none, "
        "ngram, recycling, ngram+recycling, head:FOLDER; none: plain decoding",
    )
    draft_head: str = Field(
        "",
        description="folder of the draft head of drafters with --model head:FOLDER: features are fused here and sent to them "
        "(default: that of --local-draft head:FOLDER)",
    )
    feature_window: int = Field(
        512,
        ge=1,
        le=4096,
        description="positions at the end of a text whose features a drafter with a head gets when a session is opened there",
    )
    draft_wait_ms: float = Field(200.0, ge=0, description="longest wait for a tree, however much it might gain")
    draft_prior_row_ms: float = Field(
        20.0, ge=0, description="rows times ms of drafting per round, for autoscalers until drafters report; 0: unknown"
    )
    shutdown_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running requests")

    @field_validator("draft_head")
    @classmethod
    def _one_head(cls, value: str, info: ValidationInfo) -> str:
        local = info.data.get("local_draft", "")
        if value and local.startswith(HEAD) and local != HEAD + value:
            raise ValueError(f"local_draft is {local}; give the same folder, or leave draft_head out")
        return value

    @model_validator(mode="after")
    def _nodes(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank: {self.node_rank} is not below nnodes ({self.nnodes}); machines count from 0")
        if self.tensor_parallel % self.nnodes:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} processes cannot be spread evenly over {self.nnodes} machines; use a multiple"
            )
        if self.nnodes > 1 and not self.master_port:
            raise ValueError("master_port: 0 is for one machine; give all machines the same port, such as 29500")
        return self

    @field_validator("num_ahead_tokens")
    @classmethod
    def _fits(cls, value: int | None, info: ValidationInfo) -> int | None:
        drafted = info.data.get("num_draft_tokens", 0)
        if (value or 0) + drafted > MAX_NODES:
            raise ValueError(
                f"with num_draft_tokens {drafted} it is above {MAX_NODES}, the most that drafters grow; lower one of them"
            )
        return value

    @property
    def grows_head(self) -> bool:
        """The draft head grows local trees."""
        return self.local_draft.startswith(HEAD)

    @property
    def head_folder(self) -> str:
        """Of the draft head that the verifier loads; "": none."""
        return self.draft_head or (self.local_draft.removeprefix(HEAD) if self.grows_head else "")

    @property
    def name(self) -> str:
        """What gateways ask the registry for."""
        return self.served_model_name or Path(self.model).name or self.model

    @property
    def shape(self) -> Shape:
        """Limits of the trees of all requests."""
        ahead = self.num_ahead_tokens
        return Shape(
            atoms=self.law_atoms,
            node_cap=self.num_draft_tokens,
            max_depth=self.max_depth,
            topk=self.topk,
            ahead=min(MAX_AHEAD, MAX_NODES - self.num_draft_tokens) if ahead is None else ahead,
            ahead_on_loopback=ahead or 0,
        )

    @property
    def draft_wait_s(self) -> float:
        return self.draft_wait_ms / 1e3

    @property
    def prefill_floor(self) -> int:
        """Rows of a step that rounds leave to prefill while there is any: new requests start, whatever the load."""
        return max(1, self.max_num_batched_tokens // 8)
