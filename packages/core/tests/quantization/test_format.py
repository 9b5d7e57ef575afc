"""A checkpoint format in one file is found, converts, checks and serves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.format import FORMATS, Checkpoint, Format, Weights, find_format
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import W8A8DynamicLinearMethod
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport

WEIGHT = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Transposed(Format):
    """int8 weights [in, out] with a scale per output, selected by config.json."""

    name = "transposed"
    quantizations = frozenset({"ascend"})

    @classmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> Transposed | None:
        if checkpoint.quantization.get("quant_method") != cls.name:
            return None
        names = [name for name in checkpoint.tensor_names() if name.endswith(".weight")]
        return cls(dict.fromkeys(names, "W8A8_DYNAMIC"), checkpoint.model)

    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield (name, tensor.t()) if name.endswith(".weight") else (name, tensor)

    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        for name in self.types:
            if f"{name}_scale" not in tensors:
                report.problem(f"{name}_scale", "is missing")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    FORMATS.register(Transposed)
    save_file({WEIGHT: torch.ones(12, 8, dtype=torch.int8)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": Transposed.name}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    yield tmp_path
    del FORMATS.read()[Transposed.name]


@pytest.mark.usefixtures("one_rank")
def test_a_format_of_one_file_is_found_checked_converted_and_served(checkpoint: Path):
    register()
    report = check_checkpoint(checkpoint)
    assert report.quantization == "transposed (config.json)"
    assert report.problems() == [f"{WEIGHT}_scale: is missing"]
    named = {"quant_method": Transposed.name}
    found = find_format(Checkpoint(str(checkpoint), None, named), "ascend")
    assert found is not None
    tensors = {WEIGHT: torch.zeros(12, 8, dtype=torch.int8)}
    assert dict(found.converted(tensors.items(), torch.bfloat16))[WEIGHT].shape == (8, 12)
    layer = ReplicatedLinear(
        32, 32, quant_config=AscendQuantizationConfig(found), prefix=WEIGHT.removesuffix(".weight")
    )
    assert isinstance(layer.quant_method, W8A8DynamicLinearMethod)


def test_a_description_that_does_not_read_is_a_checkpoints_error(checkpoint: Path):
    with pytest.raises(CheckpointError, match="Copy config"):
        find_format(Checkpoint(str(checkpoint), None, {"quant_method": "gptq", "dynamic": 5,
                                                       "bits": 4, "group_size": 32}))  # fmt: skip
