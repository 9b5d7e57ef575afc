"""Checks a checkpoint's tensors against the model that its config.json describes."""

import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from vllm_davinci.core.attention.mla.sizes import check_sizes
from vllm_davinci.core.checkpoint.weight_shapes import weight_shape
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import EXPERT, shortened

_LAYER = re.compile(r"^(?P<stack>.*\.)?layers\.(?P<number>\d{1,9})\.(?P<part>.+)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out)\.|^head\.")
# A layer needs both projections of a pair.
_PAIRS = (("gate_proj", "up_proj"), ("gate_proj", "down_proj"), ("k_proj", "q_proj"))


def check_against_config(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    """Checks the number of layers and experts, their matrices and sizes against config.json.

    Compares weights only: which scales exist depends on each layer's type.
    """
    text = text_config(config)
    weights = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    }
    _check_layer_count(text, tensors, report)
    _check_experts(text, weights, report)
    _check_layers_alike(text, weights, report)
    _check_pairs(weights, report)
    _check_head(config, text, weights, report)
    for prefix, weight in weights.items():
        shape = weight_shape(text, prefix)
        if shape is None or len(weight.shape) != len(shape):
            continue
        if any(size not in (None, seen) for size, seen in zip(shape, weight.shape, strict=True)):
            told = [
                seen if size is None else size
                for size, seen in zip(shape, weight.shape, strict=True)
            ]
            report.problem(
                f"{prefix}.weight", f"has shape {list(weight.shape)}; config.json says {told}"
            )
    _check_attention(text, report)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of config.json that describes the language model."""
    own = config.get("text_config")
    return own if isinstance(own, Mapping) else config


def _check_layer_count(
    text: Mapping[str, Any], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    num_layers = text.get("num_hidden_layers")
    present = {int(match["number"]) for name in tensors if (match := _LAYER.match(name))}
    if not isinstance(num_layers, int) or not present:
        return
    if absent := _absent(num_layers, present):
        report.problem("layers", f"config.json says {num_layers}, and {absent} have no tensors")
    if extra := sorted(number for number in present if number >= num_layers):
        report.note("layers", f"{_listed(extra)} lie beyond config.json's {num_layers}")


def _check_experts(
    text: Mapping[str, Any], weights: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    counts = (text.get(key) for key in keys)
    num_experts = next((count for count in counts if isinstance(count, int) and count), None)
    parts: dict[str, dict[int, set[str]]] = {}
    for prefix in weights:
        if match := EXPERT.match(prefix):
            by_number = parts.setdefault(match["experts"], {})
            by_number.setdefault(int(match["number"]), set()).add(match["part"])
    for experts, seen in sorted(parts.items()):
        absent = _absent(num_experts or 0, set(seen))
        if num_experts and (absent or len(seen) != num_experts):
            missing = f"; missing: {absent}" if absent else ""
            report.problem(
                experts, f"config.json says {num_experts} experts, {len(seen)} are there{missing}"
            )
        union = set().union(*seen.values())
        lacking = [
            f"{experts}.{number}.{part}.weight"
            for number, own in sorted(seen.items())
            for part in sorted(union - own)
        ]
        if lacking:
            report.problem(shortened(lacking, 6), "is missing; other experts of the layer have it")


def _check_layers_alike(
    text: Mapping[str, Any], weights: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    """Reports layers that lack weights. Each is compared with layers that have all of its weights
    and more, and are at least as frequent. Layers to which config.json gives different compression
    ratios are not compared (DeepSeek-V4)."""
    num_layers, ratios = text.get("num_hidden_layers"), text.get("compress_ratios")
    layers: dict[tuple[str, int], set[str]] = {}
    for prefix in weights:
        match = _LAYER.match(prefix)
        if match and not (isinstance(num_layers, int) and int(match["number"]) >= num_layers):
            place = match["stack"] or "", int(match["number"])
            layers.setdefault(place, set()).add(_NUMBER.sub("*", match["part"]))

    def alike(stack: str, number: int) -> tuple[str, Any]:
        own = ratios[number : number + 1] if isinstance(ratios, list) else []
        return stack, own[0] if own else None

    kinds = Counter((alike(*place), frozenset(parts)) for place, parts in layers.items())
    for (stack, number), parts in sorted(layers.items()):
        own = kinds[alike(stack, number), frozenset(parts)]
        whole = [
            (count, kind)
            for (group, kind), count in kinds.items()
            if group == alike(stack, number) and kind > parts and count >= own
        ]
        if whole:
            count, kind = max(whole, key=lambda each: each[0])
            lacking = [f"{stack}layers.{number}.{part}.weight" for part in sorted(kind - parts)]
            report.problem(
                shortened(lacking, 6),
                f"is missing; {count} other layer{'s have' if count > 1 else ' has'} it",
            )


def _check_pairs(weights: Mapping[str, StoredTensor], report: CheckReport) -> None:
    for prefix in sorted(weights):
        parent, _, name = prefix.rpartition(".")
        for one, other in _PAIRS:
            if name == one and f"{parent}.{other}" not in weights:
                report.problem(f"{parent}.{other}.weight", f"is missing, and {one} is there")


def _check_head(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    weights: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    """Checks the head only if config.json says that there is one and that it is not tied."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if is_tied is not False or not str(first).endswith("ForCausalLM"):
        return
    if not any(_HEAD.search(f"{prefix}.") for prefix in weights):
        report.problem(
            "lm_head.weight", "is missing, and config.json has tie_word_embeddings false"
        )


def _check_attention(text: Mapping[str, Any], report: CheckReport) -> None:
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    known = {name: text[name] for name in sizes if isinstance(text.get(name), int)}
    # GLM-5.3's attention gathers rows, so it supports any size.
    if len(known) < len(sizes) or text.get("model_type") == "glm5_next_text":
        return
    try:
        check_sizes(**known, layer_name="MLA")
    except UnsupportedFeatureError as error:
        report.problem("config.json", str(error))


def _listed(numbers: list[int]) -> str:
    return shortened(map(str, numbers), 8)


def _absent(count: int, present: set[int]) -> str:
    """Missing numbers below `count`, as a short list; empty if none is missing."""
    absent = max(count - sum(1 for number in present if number < count), 0)
    first = islice((number for number in range(count) if number not in present), min(absent, 8))
    listed = ", ".join(map(str, first))
    return f"{listed} and {absent - 8} more" if absent > 8 else listed
