"""The sample that users' functions see, with the names of Miles (miles.utils.types.Sample), and the
modules of Miles that such functions import. Where Miles itself is not installed, `install_names`
puts stand-ins with the same names into sys.modules, so that a reward or generate function written for
Miles runs unchanged. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """One answer to one prompt. `tokens` are the prompt's ids, then `response_length` response ids."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None  # as the prompt file has it
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    multimodal_inputs: dict | None = None
    train_metadata: dict | None = None
    routing_key: str | None = None
    generate_function_path: str | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def get_reward_value(self, args) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    def to_dict(self) -> dict:
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(values: dict) -> Sample:
        known = {name: value for name, value in values.items() if name in Sample.__dataclass_fields__}
        return Sample(**{**known, "status": Sample.Status(values.get("status", "pending"))})

    def update_from_meta_info(self, args, meta_info: dict) -> None:
        """Status and weight version from an answer of /generate."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        kinds = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED, "stop": Sample.Status.COMPLETED}
        self.status = kinds[meta_info["finish_reason"]["type"]]


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None


@dataclass(frozen=True)
class GenerateFnInput:
    state: Any
    sample: Sample
    sampling_params: dict
    evaluation: bool

    @property
    def args(self):
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    samples: Sample | list[Sample]


def install_names() -> None:
    """Stand-ins for the modules of Miles that functions import, unless Miles is installed. All kinds of
    functions get all names, since one module often holds a reward and a generate function; outside of a
    generate function `post` is a plain call."""
    if importlib.util.find_spec("miles") is not None:
        return
    from tandem import engine_calls  # which imports this module

    modules = {
        "miles.utils.types": {"Sample": Sample},
        "miles.rollout.base_types": {"GenerateFnInput": GenerateFnInput, "GenerateFnOutput": GenerateFnOutput},
        "miles.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
        "miles.utils.http_utils": {"post": engine_calls.post},
        "miles.rollout.generate_utils.generate_endpoint_utils": {
            "compute_prompt_ids_from_sample": engine_calls.compute_prompt_ids_from_sample,
            "compute_request_payload": engine_calls.compute_request_payload,
            "compute_routing_headers": lambda args, sample: None,
            "update_sample_from_response": engine_calls.update_sample_from_response,
        },
    }
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                module = types.ModuleType(path)
                module.__path__ = []
                sys.modules[path] = module
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
