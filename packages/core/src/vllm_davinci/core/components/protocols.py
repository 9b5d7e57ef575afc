"""The roles that optional packages fill, as protocols: operators, models, devices, streams."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")


# Version of the protocols below. A provider states the one it was written for.
API_VERSION = 1


@runtime_checkable
class OpProvider(Protocol):
    """Compiled operators that take the place of torch_npu's."""

    api_version: int

    def supported_ops(self) -> frozenset[str]:
        """Names of the operators this provider has on this device."""

    def load(self, name: str) -> Any:
        """The function of one operator."""


@runtime_checkable
class ModelProvider(Protocol):
    """Model definitions that take the place of vLLM's."""

    api_version: int

    def models(self) -> Mapping[str, str]:
        """Architecture -> class path, as vLLM's ModelRegistry takes it."""

    def sequence_parallel_architectures(self) -> frozenset[str]:
        """Architectures whose definition runs large steps sequence parallel."""


@runtime_checkable
class DeviceProvider(Protocol):
    """A device other than a chip, which computes on this host's threads."""

    api_version: int

    def is_active(self) -> bool:
        """Whether this process runs on it."""

    def can_fork(self) -> bool:
        """Whether a process forked from this one has it too."""

    def computes(self) -> bool:
        """Whether operators compute; otherwise all that the host reads is zero."""

    def limit_host_waits(self, seconds: float) -> None:
        """Longest wait of the host for it, here and in processes that start, unless one is set."""

    def is_traced(self) -> bool:
        """Whether it writes a trace of its tasks, with their streams and times."""

    def name_stream(self, handle: int, name: str) -> None:
        """Names the stream with this native handle in that trace."""

    def label_launches(self, label: str) -> None:
        """Labels tasks that are launched from now on in that trace; "" ends the label."""


@runtime_checkable
class StepCostsProvider(Protocol):
    """Files with durations of an engine's steps.

    engine: what durations depend on, by name (`core.config.step_costs.engine_of_costs`)
    """

    api_version: int

    def find(self, engine: Mapping[str, Any]) -> Path | None:
        """The file for such an engine, if there is one."""

    def make(
        self, engine: Mapping[str, Any], model: str, options: Sequence[str]
    ) -> tuple[Path | None, str]:
        """Models steps of such an engine and keeps their durations. The file, and a clause for
        "because"; None where no model of the chip is at hand.

        model:   directory of its configuration
        options: of `vllm serve`
        """


class UBatch(Protocol):
    """A contiguous range of a step's tokens, and the requests it holds tokens of."""

    @property
    def tokens(self) -> slice: ...
    @property
    def requests(self) -> slice: ...


class Split(Protocol):
    """A step cut into ubatches that together hold each token once."""

    @property
    def ubatches(self) -> Sequence[UBatch]: ...
    @property
    def cuts(self) -> Sequence[int]:
        """The tokens at which the second and later ubatches begin."""

    def slice(self, tensor: torch.Tensor | None, dim: int = 0) -> list[torch.Tensor | None]:
        """Each ubatch's rows, as views; rows after the step's tokens go to the last one."""

    def merge(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The inverse of `slice`."""


class Decision(Protocol):
    """A split, or the reason why there is none."""

    @property
    def reason(self) -> Enum: ...
    @property
    def split(self) -> Split | None: ...
    def withdrawn(self, reason: str) -> "Decision":
        """The decision to keep the step whole, for a reason that the caller has found."""


class StepFacts(Protocol):
    """Facts about one step, from which a decision follows."""

    @property
    def query_lens(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...


class SplitPolicy(Protocol):
    """Decides for each step whether to split it, from the step's facts alone."""

    def decide(self, step: Any) -> Decision: ...


class Interleave(Protocol):
    """Runs ubatches in turn; a collective is where they take turns."""

    @property
    def num_switches(self) -> int: ...
    def run(self, forwards: Sequence[Callable[[], T]], on_switch: Callable[[int], None]) -> list[T]:
        """Runs all of them to their end. The first error ends the run, which leaves nothing.

        on_switch: called with a ubatch's index each time it starts or goes on
        """


class Fork(Protocol):
    """Work of one layer on two streams, which meet again when the block is left."""

    @property
    def stream(self) -> torch.Stream:
        """The side stream, for an operator that orders its work on both streams itself."""

    def run(self, work: Callable[..., T], *tensors: torch.Tensor | None) -> T:
        """`work(*tensors)` on the side stream, after all that the main stream has so far."""

    def join(self) -> None:
        """Makes the main stream wait for all that the side stream has so far; more may follow."""


@runtime_checkable
class StreamScheduler(Protocol):
    """Ubatches and side streams. One object per process.

    The functions of the same names in vllm-davinci-multistream say what they ask of streams and
    memory.
    """

    api_version: int

    def split_policy(self, *, mode: str, **rules: Any) -> SplitPolicy:
        """The decisions of one engine. mode: "request" or "token"."""

    def step_facts(self, query_lens: Sequence[int], **facts: Any) -> StepFacts:
        """Facts about one step."""

    def interleave(self) -> Interleave:
        """Runs ubatches in turn. Called once the process has chosen its device."""

    def fork(self, role: str) -> AbstractContextManager[Fork]:
        """A side stream beside the current one. role: "vector" or "shared expert"."""

    def start(self, role: str, work: Callable[[], object]) -> None:
        """`work()` on a side stream, for which nobody waits before `finish`. role: "prefetch"."""

    def finish(self, role: str) -> None:
        """Makes the current stream wait for all that was started."""

    def name_streams(self, name: Callable[[int, str], None]) -> None:
        """Calls `name` with native handle and role of each stream created from now on."""

    def communicate(
        self,
        launch: Callable[[], Any],
        on: Literal["communication", "exchange", "library"] = "communication",
        then: Callable[[Any], Any] | None = None,
        waits: bool = True,
    ) -> Any:
        """Communicates; inside a ubatch, the others compute meanwhile."""

    def current_ubatch(self) -> int | None: ...
