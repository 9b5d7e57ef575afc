"""One rank of test_dispatcher_ranks.py: `moe_rank.py SETTING`, a JSON, with torchrun's variables.

Builds layers as vLLM's models do, gives each DP rank tokens of its own, and compares each layer's
output with plain torch. Prints what the layers launched between ranks.
"""

import collections
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the hccl backend
from vllm.config import (
    CUDAGraphMode,
    DeviceConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    get_dp_group,
    get_ep_group,
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.models.utils import sequence_parallel_chunk

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.device.timeline import launch_label
from vllm_davinci.core.distributed.communicator import NPUCommunicator
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.fused_moe.communication import RoutedSizes
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.fused_moe.process_groups import init_fused_group, init_groups_of
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.ubatch.moe_entry import let_experts_switch
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.operators.reference import dynamic_quant_in_launch, to_int8

NUM_EXPERTS, TOP_K, INTERMEDIATE_SIZE = 8, 3, 64
# Fused launches take no smaller ones, and no fp32.
HIDDEN_SIZE = 1024


# What the host waits for, as the virtual devices count it.
HOST = ("synchronizations", "copies_to_host")


def random(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values / math.sqrt(shape[-1])


GATE = random(NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, seed=1)
UP = random(NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, seed=2)
DOWN = random(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, seed=3)
SHARED = random(HIDDEN_SIZE, HIDDEN_SIZE, seed=4)


class SharedExpert(torch.nn.Module):
    """A projection, cut over the TP ranks of a DP rank by its input: they hold parts of a sum.

    whole: every rank has all of it
    """

    def __init__(self, whole: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.whole = whole
        self.register_buffer("weight", SHARED.to("npu", dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return x @ self.weight.t()
        tp = get_tp_group()
        part = slice(
            tp.rank_in_group * HIDDEN_SIZE // tp.world_size,
            (tp.rank_in_group + 1) * HIDDEN_SIZE // tp.world_size,
        )
        return x[:, part] @ self.weight[:, part].t()


class IntegerWeights:
    """A projection of all experts in int8, as a W8A8_DYNAMIC checkpoint has it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = (weight.abs().amax(-1, keepdim=True) / 127).bfloat16()
        self.integers = to_int8(weight / self.scale.float())

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name in the checkpoint."""
        return {
            "weight": self.integers,
            "weight_scale": self.scale,
            "weight_offset": torch.zeros_like(self.scale),
        }

    def product(self, expert: int, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in], integers; scale: [num_tokens, 1]. Returns [num_tokens, out]."""
        sums = (x.long() @ self.integers[expert].long().t()).float()
        return sums * self.scale[expert].float().t() * scale


GATE_UP_INT8, DOWN_INT8 = IntegerWeights(torch.cat((GATE, UP), 1)), IntegerWeights(DOWN)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and scales of rows, as launches make them that do something else, too."""
    integers, scale = dynamic_quant_in_launch(x)
    return integers, scale[:, None]


def defined_in_integers(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The routed sum alone."""
    best, ids = logits.topk(TOP_K, -1)
    weights = best.softmax(-1).bfloat16().float()
    total = torch.zeros_like(x)
    rows = quantized(x)
    for choice in range(TOP_K):  # in the order in which the sum is made
        for expert in range(NUM_EXPERTS):
            gate, up = GATE_UP_INT8.product(expert, *rows).chunk(2, -1)
            hidden = quantized(torch.nn.functional.silu(gate) * up)
            result = DOWN_INT8.product(expert, *hidden).bfloat16().float()
            is_chosen = ids[:, choice, None] == expert
            total += torch.where(is_chosen, weights[:, choice, None] * result, 0)
    return total


def defined(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = logits.softmax(-1).topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    total = x @ SHARED.t()
    for expert in range(NUM_EXPERTS):
        hidden = torch.nn.functional.silu(x @ GATE[expert].t()) * (x @ UP[expert].t())
        share = (weights * (ids == expert)).sum(-1, keepdim=True)
        total += torch.where(share != 0, share * (hidden @ DOWN[expert].t()), 0)
    return total


@contextmanager
def counting(counts: collections.Counter[str]) -> Iterator[None]:
    """Counts what our communicators launch, and what the host waits for or copies meanwhile."""
    launch_one, launch_own = NPUCommunicator._collective, NPUCommunicator.launch_own

    def count(self: NPUCommunicator, name: str, *arguments: Any, **options: Any) -> None:
        counts[f"{self.unique_name.split(':')[0]} {name}"] += 1
        launch_one(self, name, *arguments, **options)

    def count_own(self: NPUCommunicator, launch: Callable[[], Any]) -> Any:
        counts[f"{self.unique_name.split(':')[0]} launch"] += 1
        return launch_own(self, launch)

    NPUCommunicator._collective = count  # type: ignore[method-assign]
    NPUCommunicator.launch_own = count_own  # type: ignore[method-assign]
    before = _C.host_counts()
    try:
        yield
    finally:
        NPUCommunicator._collective = launch_one  # type: ignore[method-assign]
        NPUCommunicator.launch_own = launch_own  # type: ignore[method-assign]
        after = _C.host_counts()
        counts.update({name: after[name] - before[name] for name in HOST})


def build(variant: dict[str, Any], number: int) -> torch.nn.Module:
    """A layer with its weights loaded, as a model's code and vLLM's loader make it."""
    dtype = getattr(torch, variant.get("dtype", "float32"))
    prefix = f"model.layers.{number}.mlp.experts"
    kind = variant.get("quantized")
    types = {f"{prefix}.0.{name}_proj.weight": kind for name in ("gate", "up", "down")}
    layer = FusedMoEFactory(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        params_dtype=dtype,
        prefix=prefix,
        quant_config=AscendQuantizationConfig(QuantDescription.parse(types)) if kind else None,
        # Without them a quantized layer's output is the sum that the definition rounds once.
        shared_experts=(
            None if kind else SharedExpert(variant.get("sequence_parallel", False), dtype)
        ),
        is_sequence_parallel=variant.get("sequence_parallel", False),
    ).to("npu")
    experts = layer.routed_experts
    if kind:
        gate_up, down = GATE_UP_INT8.tensors(), DOWN_INT8.tensors()
        by_shard = {"w1": gate_up, "w3": gate_up, "w2": down}
    else:
        by_shard = {"w1": {"weight": GATE}, "w3": {"weight": UP}, "w2": {"weight": DOWN}}
    for shard, tensors in by_shard.items():
        for tensor, values in tensors.items():
            name = f"{'w2' if shard == 'w2' else 'w13'}_{tensor}"
            parameter = getattr(experts, name)
            load = parameter.weight_loader if kind else experts.weight_loader
            if kind and shard != "w2":  # both of a fused projection
                values = values.chunk(2, 1)[shard == "w3"]
            for expert in range(NUM_EXPERTS):
                load(parameter, values[expert], name, shard, expert)
    experts.quant_method.process_weights_after_loading(experts)
    return layer


def run_step(
    layer: torch.nn.Module,
    given: tuple[torch.Tensor, torch.Tensor],
    sizes: list[int],
    config: VllmConfig,
    is_for_graph: bool = False,
) -> torch.Tensor:
    """The layer's output. sizes: tokens of each DP rank's step"""
    own = sizes[get_dp_group().rank_in_group]
    with (
        set_forward_context(
            {"requests": None},
            config,
            num_tokens=own,
            num_tokens_across_dp=(
                torch.tensor(sizes, dtype=torch.int32) if len(sizes) > 1 else None
            ),
            cudagraph_runtime_mode=CUDAGraphMode.FULL if is_for_graph else CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(own),
        ),
        torch.inference_mode(),
    ):
        output: torch.Tensor = layer(*given)
    return output


def run_steps(
    layer: torch.nn.Module, variant: dict[str, Any], config: VllmConfig
) -> list[dict[str, int]]:
    """Runs and compares every step; what each launched between ranks."""
    launched = []
    dp_rank = get_dp_group().rank_in_group
    dtype = getattr(torch, variant.get("dtype", "float32"))
    tolerance = (2e-5, 1e-5) if dtype == torch.float32 else (3e-2, 2e-2)
    for step, sizes in enumerate(variant["steps"]):
        counts: collections.Counter[str] = collections.Counter()
        x = random(sizes[dp_rank], HIDDEN_SIZE, seed=10 * step + dp_rank) * 4
        logits = random(sizes[dp_rank], NUM_EXPERTS, seed=100 + 10 * step + dp_rank) * 4
        if variant.get("skewed"):  # everybody's experts are on the first rank
            logits[:, :TOP_K] += 9
        if variant.get("sequence_parallel"):
            x, logits = (sequence_parallel_chunk(rows.npu()).cpu() for rows in (x, logits))
        given = x.to("npu", dtype), logits.to("npu", dtype)

        is_for_graph = variant.get("for_graph", False)
        with counting(counts):
            actual = run_step(layer, given, sizes, config, is_for_graph)
        if is_for_graph:
            assert torch.equal(actual, run_step(layer, given, sizes, config))
        # Without AVX-512, ATen's products of floats take other paths for one row than for several.
        is_exact = variant.get("quantized") or "AVX512" in torch.backends.cpu.get_cpu_capability()
        ulps = 0 if is_exact else 2**-18
        pieces = layer.routed_experts.quant_method.moe_forward.pieces
        for pieces.max_tokens in (1, 3, 6):  # more pieces than some ranks have tokens
            again = run_step(layer, given, sizes, config, is_for_graph)
            torch.testing.assert_close(again, actual, atol=ulps, rtol=ulps)
        pieces.max_tokens = None
        x, logits = (rows.cpu().float() for rows in given)
        expected = defined(x, logits)
        if variant.get("quantized"):  # all but the last bit of a sum
            expected, tolerance = defined_in_integers(x, logits), (2**-16, 2**-7)
        torch.testing.assert_close(
            actual.cpu().float(), expected, atol=tolerance[0], rtol=tolerance[1]
        )
        launched.append({name: count for name, count in counts.items() if count})
    return launched


def run_in_ubatches(layer: torch.nn.Module, sizes: list[int], config: VllmConfig) -> None:
    """A product and the layer, of each ubatch in turn, as a split step runs them. Twice."""
    scheduler = components.stream_scheduler()
    assert scheduler is not None
    let_experts_switch(layer, scheduler)
    label = launch_label() or (lambda text: None)
    interleave = scheduler.interleave()
    unchanged = torch.eye(HIDDEN_SIZE).npu()

    def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return layer(x @ unchanged, logits)

    given = [
        (random(size, HIDDEN_SIZE, seed=size) * 4, random(size, NUM_EXPERTS, seed=size + 1) * 4)
        for size in sizes
    ]
    with set_forward_context({"requests": None}, config), torch.inference_mode():
        for _ in range(2):  # the first time allocates
            results = interleave.run(
                [partial(forward, x.npu(), y.npu()) for x, y in given],
                lambda index: label(f"ubatch {index}"),
            )
            for (x, logits), actual in zip(given, results, strict=True):
                torch.testing.assert_close(actual.cpu(), defined(x, logits), atol=2e-5, rtol=1e-5)
            label("")
            torch.distributed.barrier(get_tp_group().cpu_group)


def run_without_last_rank(layer: torch.nn.Module, config: VllmConfig) -> None:
    """A step of all ranks, then one to which the last never comes. Prints what they are told."""
    tp = get_tp_group()
    x, logits = random(4, HIDDEN_SIZE, seed=1).npu(), random(4, NUM_EXPERTS, seed=2).npu()
    with set_forward_context({"requests": None}, config), torch.inference_mode():
        layer(x, logits)
        begin = time.monotonic()
        try:
            if not tp.is_last_rank:
                layer(x, logits)
        except DeviceError as error:
            print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    torch.distributed.barrier(tp.cpu_group)
    os._exit(0)  # the collective under way has no end


def main(rank: int, port: int, setting: dict[str, Any]) -> None:
    tp_size, dp_size = setting["tensor"], setting["data"]
    dp_rank, tp_rank = divmod(rank, tp_size)
    torch.npu.set_device(rank)
    register()
    config = VllmConfig(
        device_config=DeviceConfig(device="npu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp_size,
            data_parallel_size=dp_size,
            data_parallel_rank=dp_rank,
            data_parallel_size_local=dp_size,
            data_parallel_master_ip="127.0.0.1",
            _data_parallel_master_port_list=[port],
            distributed_executor_backend="mp",
        ),
    )
    config.scheduler_config.max_num_seqs = 8
    config.additional_config = setting.get("options", {})
    with set_current_vllm_config(config):
        init_distributed_environment(
            tp_size, tp_rank, f"tcp://127.0.0.1:{port}", rank, backend="hccl"
        )
        initialize_model_parallel(tp_size, 1)
        for number, variant in enumerate(setting["variants"]):
            config.additional_config = variant.get("options", {})
            layout = expert_layout(config.parallel_config, get_config(config))
            init_groups_of(layout, "hccl")
            if variant.get("fused"):
                init_fused_group(
                    layout,
                    soc_of(torch.npu.get_device_name()),
                    "hccl",
                    512,  # the most that the chip takes
                    RoutedSizes(HIDDEN_SIZE, NUM_EXPERTS, TOP_K),
                )
            layer = build(variant, number)
            if variant.get("last_is_absent"):
                run_without_last_rank(layer, config)
            if sizes := variant.get("ubatches"):
                run_in_ubatches(layer, sizes, config)
                continue
            launched = run_steps(layer, variant, config)
            print(f"launched {json.dumps(launched)}", flush=True)
        torch.npu.synchronize()
        for group in (get_tp_group(), get_dp_group(), get_ep_group()):
            torch.distributed.barrier(group.cpu_group)
    print("equal", flush=True)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), json.loads(sys.argv[1]))
