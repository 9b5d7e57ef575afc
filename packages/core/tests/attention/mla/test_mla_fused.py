"""The stage before MLA in one call of a provider gives identical bits."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_davinci.core.components import fused_ops
from vllm_davinci.core.layers.quantized_activation import QuantizedActivation
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan
from vllm_davinci.core.quantization.tensors import bits_from_float
from vllm_davinci_testing.layers.mla_layer import BIAS_SIZES, DECODES, HIDDEN, MIXED, Block

PREFIX = "layers.0.attention"
STEPS = [*DECODES, *MIXED]
SIDE_STREAM = {"torchair_graph_config": {"enable_multistream_mla": True}}


@pytest.fixture(autouse=True)
def registered(one_rank: None) -> Iterator[None]:
    """Turns compiled operators off again after the test."""
    register()
    yield
    fused_ops.choose_fused_ops(False)


class QuantizedBlock(Block):
    """A block with random integer weights, created from a checkpoint's description.

    kinds: type of each projection by name; all others are floats
    input_scales: scales of static projections; default 0.03
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        kinds: dict[str, str],
        input_scales: dict[str, float] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        on_two_streams: bool = False,
        **options: Any,
    ) -> None:
        self.input_scales = input_scales or {}
        types = {f"{PREFIX}.{name}.weight": kind for name, kind in kinds.items()}
        for norm, size in BIAS_SIZES.items():
            if size in options:
                types[f"{PREFIX}.{norm}.bias"] = "W8A8"
        config = AscendQuantizationConfig(QuantDescription.parse(types))
        vllm_config.compilation_config.static_forward_context.clear()
        vllm_config.load_config.load_format = "dummy"  # no loader fills these parameters
        vllm_config.quant_config = config
        vllm_config.additional_config = SIDE_STREAM if on_two_streams else {}
        super().__init__(vllm_config, device, dtype, quant_config=config, **options)
        with device:
            self.norm = RMSNorm(HIDDEN, dtype=dtype)
        vllm_config.quant_config = None
        self.norm_outputs: Counter[type] = Counter()

    def initial(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        layer, _, tensor = name.rpartition(".")
        rows = self.module.get_parameter(f"{layer}.weight").shape[-1]
        input_scale = self.input_scales.get(layer, 0.03)

        def random(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, parameter.shape, generator=self.generator)

        if tensor == "weight" and parameter.dtype == torch.int8:
            return random(-128, 128)
        if tensor in ("weight_scale", "deq_scale"):
            # int8 has a root mean square of 74: rows of about one give results of about one.
            scale = (0.5 + random(0, 1000) / 1000) / 74 / math.sqrt(rows)
            if tensor == "weight_scale":
                return scale
            scale = scale * input_scale
            return bits_from_float(scale) if parameter.dtype == torch.int64 else scale
        if tensor == "quant_bias":
            return random(-2000, 2000)
        constants = {"weight_offset": 0.0, "input_scale": input_scale, "input_offset": -7.0}
        if tensor in constants:
            return torch.full(parameter.shape, constants[tensor])
        return super().initial(name, parameter)

    def after_a_norm(self) -> None:
        """Makes the block's input the output of a norm that may quantize it."""
        rows = torch.ones(1, HIDDEN, dtype=self.dtype, device=self.device)
        OutputPlan(torch.nn.ModuleList([self.norm, self.module])).resolve(
            [lambda: self.wrapper.mla_attn.preprocess.project(self.norm(rows, rows)[0])]
        )

        def normalize(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            positions, hidden, scaling = arguments
            normalized, _ = self.norm(hidden, hidden)
            self.norm_outputs[type(normalized)] += 1
            return positions, normalized, scaling

        self.module.register_forward_pre_hook(normalize)


Make = Callable[[], QuantizedBlock]


def check_equal(make: Make) -> tuple[Counter[str], QuantizedBlock]:
    """Runs all steps with and without compiled operators; returns the calls and the block."""
    fused_ops.choose_fused_ops(False)
    composed = make()
    expected = [composed.run(step) for step in STEPS]
    fused_ops.choose_fused_ops(True)
    calls: Counter[str] = Counter()

    def counting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            is_beside = any(isinstance(argument, torch.Stream) for argument in arguments.values())
            calls[name + " beside" * is_beside] += 1
            return operator(**arguments)

        return call

    for name, operator in fused_ops._fused_ops.items():
        fused_ops._fused_ops[name] = counting(name, operator)
    block = make()
    for step, outputs in zip(STEPS, expected, strict=True):
        for ours, theirs in zip(block.run(step), outputs, strict=True):
            assert torch.equal(ours, theirs)
            assert bool(ours.isfinite().all()) and bool(ours.any())
    for ours, theirs in zip(block.cache[:2], composed.cache[:2], strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    return calls, block


def projections(q_lora_rank: int | None, down: str, up: str, out: str = "FLOAT") -> dict[str, str]:
    names = (
        ("kv_a_proj_with_mqa", "q_proj")
        if q_lora_rank is None
        else ("fused_qkv_a_proj", "q_b_proj")
    )
    return {**dict(zip(names, (down, up), strict=True)), "kv_b_proj": "FLOAT", "o_proj": out}


RANKS = pytest.mark.parametrize("q_lora_rank", [48, None], ids=["q_lora", "no_q_lora"])
KINDS = pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC"])


@RANKS
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_quantized_block_is_prepared_in_one_call(kind, q_lora_rank, dtype, vllm_config, device):
    kinds = projections(q_lora_rank, kind, kind, kind)

    make = partial(QuantizedBlock, vllm_config, device, kinds, dtype=dtype)
    calls, _ = check_equal(partial(make, q_lora_rank=q_lora_rank))
    assert calls["mla_preprocess_w8a8"] == len(STEPS)
    assert not calls["rms_norm"] and not calls["mla_preprocess"]


@RANKS
@KINDS
def test_rows_quantized_by_the_norm_are_used_unchanged(kind, q_lora_rank, vllm_config, device):
    kinds = projections(q_lora_rank, kind, kind)

    def make() -> QuantizedBlock:
        block = QuantizedBlock(vllm_config, device, kinds, q_lora_rank=q_lora_rank)
        block.after_a_norm()
        return block

    calls, block = check_equal(make)
    assert calls["mla_preprocess_w8a8"] == len(STEPS)
    norm = {"W8A8_DYNAMIC": "add_rms_norm_dynamic_quant", "W8A8": "add_rms_norm_quant"}[kind]
    assert block.norm_outputs == {QuantizedActivation: len(STEPS)}
    assert calls[norm] == len(STEPS)


@KINDS
def test_biases_of_both_norms_are_in_the_one_call(kind, vllm_config, device):
    kinds = projections(48, kind, kind)

    make = partial(QuantizedBlock, vllm_config, device, kinds, q_bias=0.7, kv_bias=0.7)
    calls, block = check_equal(make)
    assert calls["mla_preprocess_w8a8"] == len(STEPS)
    assert block.wrapper.q_a_layernorm.loaded_bias.any()


@RANKS
@KINDS
def test_on_two_streams_it_is_one_call_in_decodes(kind, q_lora_rank, vllm_config, device):
    kinds = projections(q_lora_rank, kind, kind)

    make = partial(QuantizedBlock, vllm_config, device, kinds, on_two_streams=True)
    calls, _ = check_equal(partial(make, q_lora_rank=q_lora_rank))
    assert calls["mla_preprocess_w8a8 beside"] == 2
    assert calls["mla_preprocess_w8a8"] == len(STEPS) - 2


@pytest.mark.parametrize(
    ("q_lora_rank", "down", "up", "input_scales"),
    [
        (48, "W8A8", "W8A8_DYNAMIC", {}),
        (48, "W8A8_DYNAMIC", "W8A8", {}),
        (48, "FLOAT", "W8A8_DYNAMIC", {}),
        (48, "W8A8", "FLOAT", {}),
        (None, "W8A8", "W8A8_DYNAMIC", {}),
        (None, "FLOAT", "W8A8", {}),
        (None, "W8A8_DYNAMIC", "FLOAT", {}),
        (None, "W8A8", "W8A8", {"q_proj": 0.04}),
    ],
)
def test_projections_of_several_kinds_are_composed(
    q_lora_rank: int | None, down: str, up: str, input_scales: dict[str, float],
    vllm_config: VllmConfig, device: torch.device,
):  # fmt: skip
    kinds = projections(q_lora_rank, down, up)

    def make() -> QuantizedBlock:
        block = QuantizedBlock(vllm_config, device, kinds, input_scales, q_lora_rank=q_lora_rank)
        block.after_a_norm()
        return block

    calls, _ = check_equal(make)
    assert not any(name.startswith("mla_preprocess") for name in calls)
    assert calls["mla_decode_attention"]


def test_queries_without_a_rank_share_rows_of_an_equal_input_scale(vllm_config, device):
    kinds = projections(None, "W8A8", "W8A8")
    scales = {"q_proj": 0.04, "kv_a_proj_with_mqa": 0.04}

    def make() -> QuantizedBlock:
        return QuantizedBlock(vllm_config, device, kinds, scales, q_lora_rank=None)

    calls, _ = check_equal(make)
    assert calls["mla_preprocess_w8a8"] == len(STEPS)


def test_a_float_block_with_a_bias_of_its_norm_of_kv_c_is_prepared_in_one_call(vllm_config, device):
    kinds = projections(None, "FLOAT", "FLOAT")

    def make() -> QuantizedBlock:
        return QuantizedBlock(vllm_config, device, kinds, q_lora_rank=None, kv_bias=1.0)

    calls, block = check_equal(make)
    assert calls["mla_preprocess"] == len(STEPS)
    assert block.wrapper.mla_attn.impl.value_bias.any()
