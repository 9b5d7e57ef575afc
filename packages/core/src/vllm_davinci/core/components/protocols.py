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
    """Compiled operators that replace torch_npu's."""

    api_version: int

    def supported_ops(self) -> frozenset[str]:
        """Names of the operators that this provider supports on this device."""

    def load(self, name: str) -> Any:
        """The function of one operator."""


@runtime_checkable
class ModelProvider(Protocol):
    """Model definitions that replace vLLM's."""

    api_version: int

    def models(self) -> Mapping[str, str]:
        """Architecture -> class path, in the form of vLLM's ModelRegistry."""

    def sequence_parallel_architectures(self) -> frozenset[str]:
        """Architectures whose definition runs large steps sequence parallel."""


@runtime_checkable
class DeviceProvider(Protocol):
    """A device other than a chip, computed by this host's threads."""

    api_version: int

    def is_active(self) -> bool:
        """True if this process runs on it."""

    def can_fork(self) -> bool:
        """True if a process forked from this one can use it too."""

    def computes(self) -> bool:
        """True if operators compute; otherwise everything that the host reads is zero."""

    def limit_host_waits(self, seconds: float) -> None:
        """Sets the host's timeout for this device, here and in child processes, if unset."""

    def is_traced(self) -> bool:
        """True if it writes a trace of its tasks with their streams and times."""

    def name_stream(self, handle: int, name: str) -> None:
        """Names the stream with this native handle in that trace."""

    def label_launches(self, label: str) -> None:
        """Labels all tasks launched from now on in that trace; "" ends the label."""


@runtime_checkable
class StepCostsProvider(Protocol):
    """Files with an engine's step times.

    engine: what step times depend on, by name (`core.config.step_costs.engine_of_costs`)
    """

    api_version: int

    def find(self, engine: Mapping[str, Any]) -> Path | None:
        """The file for such an engine, if one exists."""

    def make(
        self, engine: Mapping[str, Any], model: str, options: Sequence[str]
    ) -> tuple[Path | None, str]:
        """Models such an engine's steps and stores their times. Returns the file, or None if the
        chip has no timing model here, and the reason, a clause.

        model:   directory of its configuration
        options: of `vllm serve`
        """


class UBatch(Protocol):
    """A contiguous range of a step's tokens and the requests that they belong to."""

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
        """Each ubatch's rows, as views; the last ubatch also gets rows after the step's tokens."""

    def merge(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The inverse of `slice`."""


class Decision(Protocol):
    """A split, or the reason why the step stays whole."""

    @property
    def reason(self) -> Enum: ...
    @property
    def split(self) -> Split | None: ...
    def withdrawn(self, reason: str) -> "Decision":
        """Replaces the split with the decision to keep the step whole, for the caller's reason."""


class StepFacts(Protocol):
    """Facts about one step from which its decision follows."""

    @property
    def query_lens(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...


class SplitPolicy(Protocol):
    """Decides for each step whether to split it, from the step's facts only."""

    def decide(self, step: Any) -> Decision: ...


class Interleave(Protocol):
    """Runs ubatches alternately; they switch at collectives."""

    @property
    def num_switches(self) -> int: ...
    def run(self, forwards: Sequence[Callable[[], T]], on_switch: Callable[[int], None]) -> list[T]:
        """Runs all to their end. The first error ends the run and leaves nothing behind.

        on_switch: called with a ubatch's index each time it starts or continues
        """


class Fork(Protocol):
    """Work of one layer on two streams, which join at the end of the block."""

    @property
    def stream(self) -> torch.Stream:
        """The side stream, for an operator that orders its work on both streams itself."""

    def run(self, work: Callable[..., T], *tensors: torch.Tensor | None) -> T:
        """Runs `work(*tensors)` on the side stream, after the main stream's work so far."""

    def join(self) -> None:
        """Makes the main stream wait for the side stream's work so far; more may follow."""


@runtime_checkable
class StreamScheduler(Protocol):
    """Runs ubatches and side streams. One object per process.

    The functions of the same names in vllm-davinci-multistream document their requirements on
    streams and memory.
    """

    api_version: int

    def split_policy(self, *, mode: str, **rules: Any) -> SplitPolicy:
        """The split policy of one engine. mode: "request" or "token"."""

    def step_facts(self, query_lens: Sequence[int], **facts: Any) -> StepFacts:
        """Facts about one step."""

    def interleave(self) -> Interleave:
        """Runs ubatches alternately. Called once the process has chosen its device."""

    def fork(self, role: str) -> AbstractContextManager[Fork]:
        """A side stream that overlaps with the current one. role: "vector" or "shared expert"."""

    def start(self, role: str, work: Callable[[], object]) -> None:
        """Starts `work()` on a side stream; only `finish` waits for it. role: "prefetch"."""

    def finish(self, role: str) -> None:
        """Makes the current stream wait for all started work."""

    def name_streams(self, name: Callable[[int, str], None]) -> None:
        """Calls `name` with native handle and role of each stream created from now on."""

    def communicate(
        self,
        launch: Callable[[], Any],
        on: Literal["communication", "exchange", "library"] = "communication",
        then: Callable[[Any], Any] | None = None,
        waits: bool = True,
    ) -> Any:
        """Communicates; inside a ubatch, the other ubatches compute meanwhile."""

    def current_ubatch(self) -> int | None: ...
