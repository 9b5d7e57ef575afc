"""Workers that count their launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from triton import knobs
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.runner import moe_runner

from vllm_davinci.core.components import fused_ops
from vllm_davinci.core.distributed.communicator import NPUCommunicator
from vllm_davinci.kernels._C import launch_count
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.layers.launch_counter import LaunchCounter


class CountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def count_collectives(self) -> None:
        """Starts counting launches between the TP ranks of a DP rank."""
        communicator = get_tp_group().device_communicator
        assert isinstance(communicator, NPUCommunicator)
        self.counted: Counter[str] = Counter()
        self._host_counts = _C.host_counts()
        launch = communicator._collective

        def counting(name: str, *arguments: Any, **options: Any) -> None:
            self.counted[name] += 1
            launch(name, *arguments, **options)

        hook: Callable[..., None] = counting
        communicator._collective = hook  # for this object only

    def collectives(self) -> dict[str, int]:
        """Returns the number of launches of each collective."""
        return dict(self.counted)

    def host_waits(self) -> dict[str, int]:
        """Returns how often the host waited for the device, and copied from it, since counting
        began.
        """
        now = _C.host_counts()
        return {
            name: now[name] - self._host_counts[name]
            for name in ("synchronizations", "copies_to_host")
        }


class CallCountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls.

    Calls that also use a side stream count as "NAME beside".
    """

    def count_compiled_calls(self) -> None:
        """Starts counting layers' calls of compiled operators."""
        self.called: Counter[str] = Counter()
        for name, operator in fused_ops._fused_ops.items():
            fused_ops._fused_ops[name] = self._counting(name, operator)

    def _counting(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def counting(**arguments: Any) -> Any:
            is_beside = any(isinstance(argument, torch.Stream) for argument in arguments.values())
            self.called[name + " beside" * is_beside] += 1
            return operator(**arguments)

        return counting

    def compiled_calls(self) -> dict[str, int]:
        """Returns the number of calls of each operator."""
        return dict(self.called)


class TritonCountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def count_triton_launches(self) -> None:
        """Starts counting launches of Triton kernels."""
        self.launched: Counter[str] = Counter()
        hook = knobs.runtime.launch_enter_hook
        hook.add(lambda metadata: self.launched.update([metadata.get()["name"]]))

    def triton_launches(self) -> dict[str, int]:
        """Returns the number of launches of each kernel."""
        return dict(self.launched)


class LaunchCountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any

    def count_launches(self, with_compiled_operators: bool) -> None:
        """Starts counting calls per layer, with or without compiled operators."""
        fused_ops.choose_fused_ops(with_compiled_operators)
        self.launched: dict[int, tuple[list[str], int]] = {}
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "_forward_entry"):
                # A dispatch mode does not see inside the operator that vLLM wraps the layer in.
                is_shared = module._shared_experts is not None
                module._forward_entry = (
                    moe_runner._moe_forward_shared if is_shared else moe_runner._moe_forward
                )
        for number, layer in enumerate(getattr(model, "language_model", model).model.layers):
            self._count(number, layer)

    def _count(self, number: int, layer: torch.nn.Module) -> None:
        counters: list[tuple[LaunchCounter, int]] = []

        def begin(*_: Any) -> None:
            torch.npu.synchronize()
            counters.append((LaunchCounter().__enter__(), launch_count()))

        def end(*_: Any) -> None:
            counter, before = counters.pop()
            counter.__exit__(None, None, None)
            torch.npu.synchronize()
            self.launched[number] = counter.names, launch_count() - before

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    def launches(self) -> dict[int, tuple[list[str], int]]:
        """Returns, by layer, the host's calls in the newest step, and the compiled launches."""
        return self.launched


class StepCountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls.

    Counts the whole process's waits from the beginning of a step to the beginning of the next,
    including outputs on another thread.
    """

    model_runner: Any

    def count_waits_of_steps(self) -> None:
        """Starts counting the waits of each step."""
        runner = self.model_runner
        self._counted_steps: list[tuple[int, int, int, int]] = []
        self._waits_in_forward = self._launches_of_inputs = 0
        execute, forward = runner.execute_model, runner.model.forward

        def counting_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = scheduler_output.total_num_scheduled_tokens
            self._counted_steps.append(
                (
                    tokens,
                    _host_count("synchronizations"),
                    self._waits_in_forward,
                    self._launches_of_inputs,
                )
            )
            return execute(scheduler_output, *args, **kwargs)

        def counting_forward(*args: Any, **kwargs: Any) -> Any:
            before = _host_count("synchronizations")
            output = forward(*args, **kwargs)
            self._waits_in_forward += _host_count("synchronizations") - before
            return output

        def counting(prepare: Callable[..., Any]) -> Callable[..., Any]:
            def counting_prepare(*args: Any, **kwargs: Any) -> Any:
                before = _host_count("launches")
                inputs = prepare(*args, **kwargs)
                self._launches_of_inputs += _host_count("launches") - before
                return inputs

            return counting_prepare

        runner.execute_model = counting_execute  # for this object only
        runner.model.forward = counting_forward
        for name in ("prepare_inputs", "prepare_attn"):
            setattr(runner, name, counting(getattr(runner, name)))

    def waits_of_steps(self) -> list[StepWaits]:
        """Returns the waits of each step except the last."""
        steps = self._counted_steps
        found = [
            StepWaits(
                before[0], *(now - then for then, now in zip(before[1:], after[1:], strict=True))
            )
            for before, after in pairwise(steps)
        ]
        steps.clear()
        return found


class StepWaits(NamedTuple):
    """Counts of the process's waits for the device in a step with these tokens.

    all:             all waits, including those for outputs on another thread
    in_forward:      waits during the model's forward
    input_launches:  number of copies and operators that prepared the step's inputs
    """

    tokens: int
    all: int
    in_forward: int
    input_launches: int


def _host_count(name: str) -> int:
    count: int = _C.host_counts()[name]
    return count
