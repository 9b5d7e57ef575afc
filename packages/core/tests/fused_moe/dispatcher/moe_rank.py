"""One rank of test_dispatcher.py: `moe_rank.py SETTING`, a JSON, with torchrun's variables.

Builds layers like vLLM's models, gives each DP rank its own tokens, and compares each layer's
output with plain torch. Prints the layers' launches between ranks.
"""

import collections
import json
import os
import sys
import time
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
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.fused_moe.communication import RoutedSizes
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.fused_moe.process_groups import init_fused_group, init_groups_of
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.ubatch.moe_entry import let_experts_switch
from vllm_davinci_testing.layers.communicator_counts import counting
from vllm_davinci_testing.operators.routed_layer import (
    DOWN,
    DOWN_INT8,
    GATE,
    GATE_UP_INT8,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    NUM_EXPERTS,
    SHARED,
    TOP_K,
    UP,
    defined,
    defined_in_integers,
    random,
)


class SharedExpert(torch.nn.Module):
    """A projection whose input is divided among the TP ranks of a DP rank, so that outputs are
    partial sums.

    whole: True if every rank has the whole projection
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


def build(variant: dict[str, Any], number: int) -> torch.nn.Module:
    """Makes a layer like a model, with weights loaded like by vLLM's loader."""
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
        # A quantized layer has none, so that its output is the sum, rounded once.
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
            if kind and shard != "w2":  # both parts of a fused projection
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
    """Returns the layer's output. sizes: number of tokens on each DP rank"""
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
    """Runs and compares every step; returns its launches between ranks."""
    launched = []
    dp_rank = get_dp_group().rank_in_group
    dtype = getattr(torch, variant.get("dtype", "float32"))
    tolerance = (2e-5, 1e-5) if dtype == torch.float32 else (3e-2, 2e-2)
    for step, sizes in enumerate(variant["steps"]):
        counts: collections.Counter[str] = collections.Counter()
        x = random(sizes[dp_rank], HIDDEN_SIZE, seed=10 * step + dp_rank) * 4
        logits = random(sizes[dp_rank], NUM_EXPERTS, seed=100 + 10 * step + dp_rank) * 4
        if variant.get("skewed"):  # the first rank has all tokens' experts
            logits[:, :TOP_K] += 9
        if variant.get("sequence_parallel"):
            x, logits = (sequence_parallel_chunk(rows.npu()).cpu() for rows in (x, logits))
        given = x.to("npu", dtype), logits.to("npu", dtype)

        is_for_graph = variant.get("for_graph", False)
        with counting(counts):
            actual = run_step(layer, given, sizes, config, is_for_graph)
        if is_for_graph:
            assert torch.equal(actual, run_step(layer, given, sizes, config))
        # Without AVX-512, ATen's float products take other paths for one row than for several.
        is_exact = variant.get("quantized") or "AVX512" in torch.backends.cpu.get_cpu_capability()
        ulps = 0 if is_exact else 2**-18
        pieces = layer.routed_experts.quant_method.moe_forward.pieces
        for pieces.max_tokens in (1, 3, 6):  # more chunks than some ranks have tokens
            again = run_step(layer, given, sizes, config, is_for_graph)
            torch.testing.assert_close(again, actual, atol=ulps, rtol=ulps)
        pieces.max_tokens = None
        x, logits = (rows.cpu().float() for rows in given)
        expected = defined(x, logits)
        if variant.get("quantized"):  # equal except for the last bit of a sum
            expected, tolerance = defined_in_integers(x, logits), (2**-16, 2**-7)
        torch.testing.assert_close(
            actual.cpu().float(), expected, atol=tolerance[0], rtol=tolerance[1]
        )
        launched.append({name: count for name, count in counts.items() if count})
    return launched


def run_in_ubatches(layer: torch.nn.Module, sizes: list[int], config: VllmConfig) -> None:
    """Runs two steps of interleaved ubatches; each ubatch is a product and the layer."""
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
        for _ in range(2):  # the first run allocates memory
            results = interleave.run(
                [partial(forward, x.npu(), y.npu()) for x, y in given],
                lambda index: label(f"ubatch {index}"),
            )
            for (x, logits), actual in zip(given, results, strict=True):
                torch.testing.assert_close(actual.cpu(), defined(x, logits), atol=2e-5, rtol=1e-5)
            label("")
            torch.distributed.barrier(get_tp_group().cpu_group)


def run_without_last_rank(layer: torch.nn.Module, config: VllmConfig) -> None:
    """Runs a step on all ranks, then a step that the last rank never joins. Prints the errors."""
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
    os._exit(0)  # the collective in flight never ends


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
                    512,  # the chip's maximum
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
