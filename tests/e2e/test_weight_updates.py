"""A running engine's new weights equal a fresh engine's bit for bit, also in graphs."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.lora.request import LoRARequest

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.weight_transfer.ipc_engine import NPUIPCTrainerInitInfo
from vllm_davinci_testing.engines import weight_buckets
from vllm_davinci_testing.engines.adapters import write_adapter
from vllm_davinci_testing.engines.changed_checkpoint import changed
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.generating import bits
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

NIGHTLY = pytest.mark.nightly("weights")
WORKER = "vllm_davinci_testing.engines.updating_worker.UpdatingWorker"
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "worker_extension_cls": WORKER,
    "enable_prefix_caching": False,  # otherwise the caller would have to reset the prefix cache
    **decode_graphs(4, 8),
}
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
SENT = {"weight_transfer_config": {"backend": "npu_ipc"}}


class EngineClient:
    """vLLM's trainer interface for an engine in another process."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.weight_sync("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._engine.weight_sync("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.weight_sync("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        self._engine.weight_sync("finish_weight_update")


class CheckpointSource(WeightSource):
    """A checkpoint's tensors on a trainer's device."""

    def __init__(self, checkpoint: Path) -> None:
        self._tensors = weight_buckets.tensors_of(checkpoint)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._tensors]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, each.to("npu")) for name, each in self._tensors)


def update(engine: EngineProcess, way: str, checkpoint: Path, addresses: list[str]) -> None:
    """Gives the engine a checkpoint's weights. way: a row of the guide's table"""
    if way == "reload":
        engine.on_workers("reload_from", str(checkpoint))
    elif way == "npu_ipc":
        torch.npu.set_device(0)
        trainer = WeightTransferTrainerFactory.trainer_init(
            NPUIPCTrainerInitInfo(buffer_bytes=1 << 18, rank=0),
            client=EngineClient(engine),
            source=CheckpointSource(checkpoint),
        )
        trainer.send_weights()
    else:
        tensors = weight_buckets.tensors_of(checkpoint)
        if way == "cpu, names of wrapped layers":
            tensors = [(name.replace("_proj.", "_proj.base_layer."), t) for name, t in tensors]
        with weight_buckets.sending(addresses, tensors, shared_on=way[:3]):
            engine.on_workers("load_buckets", addresses)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("tiny_llama", {}, id="dense", marks=NIGHTLY),
        pytest.param(
            "tiny_deepseek", {"tensor_parallel_size": 2}, id="mla_experts_tp2", marks=NIGHTLY
        ),
        pytest.param("tiny_llama", LORA, id="dense_adapters", marks=NIGHTLY),
        pytest.param(
            "tiny_deepseek",
            {"tensor_parallel_size": 2, **LORA},
            id="mla_experts_tp2_adapters",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_updated_weights_equal_those_of_a_fresh_engine(
    repository, start_engine, prompts, tmp_path, name, options
):
    old = repository / "checkpoints" / name
    new = changed(old, tmp_path / "new", seed=1)
    given = prompts[3:7]
    ranks = options.get("tensor_parallel_size", 1)
    addresses = [f"ipc://{tmp_path}/{rank}" for rank in range(ranks)]
    adapter = None
    if "enable_lora" in options:
        network = TransformersReference(old).network
        adapter = LoRARequest("a", 1, str(write_adapter(network, tmp_path / "a", 8, seed=2)))
    with start_engine(new, **SMALL, **options) as fresh:
        expected = bits(fresh, given, adapter)
        digests = fresh.on_workers("compute_weight_checksums")
    with start_engine(old, **SMALL, **SENT, **options) as engine:
        first = bits(engine, given, adapter)
        places, taken = engine.on_workers("addresses"), engine.on_workers("allocated_bytes")
        assert first != expected
        ways = [("reload", new), ("npu", old), ("cpu", new), ("reload", old)]
        if adapter is not None:
            ways += [("cpu, names of wrapped layers", new)]
        if ranks == 1:  # the trainer is a single process
            ways += [("npu_ipc", new), ("npu_ipc", old), ("npu_ipc", new)]
        for way, checkpoint in ways:
            update(engine, way, checkpoint, addresses)
            tokens = expected if checkpoint == new else first
            assert bits(engine, given, adapter) == tokens, (way, checkpoint.name)
            assert engine.on_workers("addresses") == places
            assert engine.on_workers("allocated_bytes") == taken, (way, "keeps memory")
            if checkpoint == new:
                assert engine.on_workers("compute_weight_checksums") == digests
        if ranks > 1:
            with pytest.raises(EngineError, match="start a rank of the trainer on each worker's"):
                update(engine, "npu_ipc", new, addresses)


@NIGHTLY
def test_quantized_weights_are_not_updated(tiny_llama, start_engine, tmp_path):
    quantized = tmp_path / "int8"
    ranges = input_ranges(tiny_llama, [torch.tensor([[*range(40, 90)]])])
    Exporter(tiny_llama, quantized, "W8A8", torch.bfloat16, ranges).run(lambda _: None)
    with start_engine(quantized, dtype="bfloat16", **SMALL) as engine:
        expected = bits(engine, [[5, 6, 7]])
        for way in ("reload", "cpu"):
            with pytest.raises(EngineError, match=r"[Nn]ew weights"):
                update(engine, way, quantized, [f"ipc://{tmp_path}/0"])
        assert bits(engine, [[5, 6, 7]]) == expected
