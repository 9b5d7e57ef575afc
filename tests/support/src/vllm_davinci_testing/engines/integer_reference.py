"""An int8 checkpoint in transformers, with plain integers in every quantized layer.

In fp32 it gives the tokens of a 16-bit engine unless two logits are close. In bf16 it shows the
effect of rounding between layers: a rounded input may become another integer.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_davinci.operators.quantization import dynamic_quant, static_quant
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

DESCRIPTIONS = "quant_model_description*.json"

Product = Callable[[Tensor], Tensor]


def integer_product(tensors: dict[str, Tensor], kind: str) -> Product:
    """Returns the product of one layer, from [..., in] to [..., out], both fp32.

    tensors: the layer's tensors in the checkpoint, by the last part of their names
    """
    if kind == "W4A8_DYNAMIC":  # a byte has two rows, the first in its low half
        packed = tensors["weight"]
        rows = torch.stack((packed << 4 >> 4, packed >> 4), dim=1).flatten(0, 1)
        tensors, kind = {**tensors, "weight": rows}, "W8A8_DYNAMIC"
    if kind == "W8A8_MIX":
        kind = "W8A8_DYNAMIC"
    if kind in ("W8A16", "W4A16"):
        floats = {name: tensors[name] for name in ("bias",) if name in tensors}
        tensors, kind = {**floats, "weight": weight_only_floats(tensors, kind)}, "FLOAT"
    weight = tensors["weight"].double()
    if kind == "FLOAT":
        floats = {name: tensor.float() for name, tensor in tensors.items()}
        return lambda x: nn.functional.linear(x, floats["weight"], floats.get("bias"))
    if kind == "W8A8":
        deq_scale = tensors["deq_scale"]
        if not deq_scale.dtype.is_floating_point:
            deq_scale = deq_scale.int().view(torch.float32)
        scale, offset = tensors["input_scale"].float(), tensors["input_offset"].float()

        def static(x: Tensor) -> Tensor:
            integers = static_quant(x, scale, offset).double()
            return ((integers @ weight.t() + tensors["quant_bias"]) * deq_scale).float()

        return static
    assert kind == "W8A8_DYNAMIC", kind

    def dynamic(x: Tensor) -> Tensor:
        integers, scales = dynamic_quant(x)
        sums = integers.double() @ weight.t() * tensors["weight_scale"].flatten()
        result = sums.float() * scales.unsqueeze(-1)
        return result + tensors["bias"].float() if "bias" in tensors else result

    return dynamic


def weight_only_floats(tensors: dict[str, Tensor], kind: str) -> Tensor:
    """Returns floats [out, in], rounded as in the product of a bf16 engine."""
    weight, scale, offset = (tensors[f"weight{part}"] for part in ("", "_scale", "_offset"))
    scale, offset = (each.float().reshape(len(each), -1) for each in (scale, offset))
    if kind == "W4A16" and bool((weight.abs().int() > 8).any()):  # two integers per byte
        low, high = weight << 4 >> 4, weight >> 4
        is_rows = len(weight) < len(scale)
        weight = torch.stack((low, high), dim=1 if is_rows else 2)
        weight = weight.flatten(0, 1) if is_rows else weight.flatten(1)
    wide = weight.float().unflatten(1, (scale.shape[1], -1)) - offset.unsqueeze(2)
    values: Tensor = (wide * scale.bfloat16().float().unsqueeze(2)).bfloat16()
    return values.flatten(1)


class IntegerLinear(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.weight = torch.empty(0)  # models read its dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.float()).to(x.dtype)


class IntegerExperts(nn.Module):
    """Runs routed experts one after the other.

    products:    products with gate, up and down of each expert
    limit:       bound of gate and up: DeepSeek-V4's swiglu_limit
    alpha, beta: parameters of MiniMax-M3's SwiGLU
    """

    def __init__(
        self,
        products: list[tuple[Product, Product, Product]],
        limit: float = math.inf,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        super().__init__()
        self.products, self.limit, self.alpha, self.beta = products, limit, alpha, beta

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size]; the others: [num_tokens, top_k]."""
        total = torch.zeros_like(hidden)
        for number, (gate, up, down) in enumerate(self.products):
            rows, place = (top_k_index == number).nonzero(as_tuple=True)
            if len(rows):
                x = hidden[rows].float()
                gated = gate(x).clamp(max=self.limit)
                gated = gated * torch.sigmoid(self.alpha * gated)
                gated = gated * (up(x).clamp(-self.limit, self.limit) + self.beta)
                result = down(gated.to(hidden.dtype).float())
                result *= top_k_weights[rows, place].unsqueeze(1)
                total.index_add_(0, rows, result.to(total.dtype))
        return total


def added(bias: Tensor) -> Callable[..., Tensor]:
    """Returns a hook that adds a bias to a module's output."""
    return lambda module, inputs, output: output + bias


class IntegerReference(TransformersReference):
    """A checkpoint in ModelSlim's format, of any supported type.

    kv_b_proj is computed from floats, like MLA's absorbed matrices.
    """

    def __init__(
        self,
        checkpoint: Path,
        auto_class: Any = transformers.AutoModelForCausalLM,
        prefixes: Mapping[str, str] | None = None,
        named: Callable[[str], str] = lambda name: name,
        joined: Mapping[str, Sequence[str]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """auto_class: transformers' class for this kind of model
        prefixes:   prefixes of names in the checkpoint -> in transformers, where they differ
        named:      a tensor's name in the checkpoint -> in transformers, instead of prefixes
        joined:     a float layer in transformers -> layers of the checkpoint that it joins
        dtype:      dtype of values between the layers
        """
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        self.network = auto_class.from_config(
            config, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.network.generation_config.eos_token_id = None
        (description,) = checkpoint.glob(DESCRIPTIONS)
        types = json.loads(description.read_text(encoding="utf-8"))
        self._layers: dict[str, dict[str, Tensor]] = {}
        self._types: dict[str, str] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                prefix, _, last = name.rpartition(".")
                own = next(
                    (to + name[len(begin) :]
                     for begin, to in (prefixes or {}).items() if name.startswith(begin)),
                    named(name),
                )  # fmt: skip
                own, _, last = own.rpartition(".")
                self._layers.setdefault(own, {})[last] = tensor
                self._types[own] = types.get(f"{prefix}.weight", "FLOAT")
        for name, module in list(self.network.named_modules()):
            parent, _, last = name.rpartition(".")
            parts = [self._layers.get(f"{parent}.{part}") for part in (joined or {}).get(last, ())]
            if parts and all(parts):
                whole = torch.cat([part["weight"] for part in parts if part])
                self._layers[name] = {"weight": whole}
            self._replace(name, module)

    def _replace(self, name: str, module: nn.Module) -> None:
        if f"{name}.0.gate_proj" in self._layers:
            limit = getattr(module, "limit", getattr(module, "swiglu_limit", math.inf))
            count = len({key for key in self._layers if key.startswith(f"{name}.")}) // 3
            parts = ("gate_proj", "up_proj", "down_proj")
            self._set(name, IntegerExperts([
                tuple(self._product(f"{name}.{number}.{part}") for part in parts)  # type: ignore[misc]
                for number in range(count)
            ], limit, getattr(module, "swiglu_alpha", 1.0),
                float(hasattr(module, "swiglu_alpha"))))  # fmt: skip
        elif (of_gate := name.replace("gate_up_proj", "gate_proj")) != name and (
            of_gate in self._layers
        ):
            both = [self._product(name.replace("gate_up", part)) for part in ("gate", "up")]
            self._set(name, IntegerLinear(lambda x: torch.cat([each(x) for each in both], -1)))
        elif type(module) is nn.Linear and name in self._layers:
            self._set(name, IntegerLinear(self._product(name)))
        elif name in self._layers:
            with torch.no_grad():
                for last, tensor in self._layers[name].items():
                    target = getattr(module, last, None)
                    if target is not None:
                        target.copy_(tensor)
                    elif last == "bias":  # bias of a norm with moved outliers
                        module.register_forward_hook(added(tensor.float()))

    def _product(self, prefix: str) -> Product:
        tensors, kind = self._layers[prefix], self._types[prefix]
        if prefix.endswith("kv_b_proj") and kind.startswith("W8A8"):
            if kind == "W8A8":
                deq_scale = tensors["deq_scale"]
                if not deq_scale.dtype.is_floating_point:
                    deq_scale = deq_scale.int().view(torch.float32)
                scale = (deq_scale / tensors["input_scale"].float()).unsqueeze(1)
            else:
                scale = tensors["weight_scale"].float()
            return integer_product({"weight": tensors["weight"].float() * scale}, "FLOAT")
        return integer_product(tensors, kind)

    def _set(self, name: str, module: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self.network.get_submodule(parent), last, module)
