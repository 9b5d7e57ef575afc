"""Checks that the model used all tensors of its checkpoint and that no parameter is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import StageMissingLayer, WeightsMapper

from vllm_davinci.core.checkpoint.tracking import LoadTracker
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.quantization.experts_method import QuantizedFusedMoEMethodBase
from vllm_davinci.core.quantization.format import Format
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase
from vllm_davinci.core.quantization.loading import CHECK_COMMAND
from vllm_davinci.core.quantization.scheme import SCHEMES
from vllm_davinci.core.weight_files.layer_names import FUSED_LAYERS, shortened

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Computed from config.json, or from an EAGLE-3 head's d2t, even if files contain them.
_DERIVED = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.(masked_)?bias$|^(model\.)?t2d$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
_EXPERT_PARTS = {"w13_": ("gate_proj", "up_proj", "w1", "w3"), "w2_": ("down_proj", "w2")}


def require_complete(
    tracker: LoadTracker,
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    format: Format | None,
    model_config: ModelConfig | None = None,
) -> None:
    """Raises CheckpointError that names unused and missing tensors.

    model_config: of the model, if it is not the engine's (a drafter)
    """
    model_config = model_config or vllm_config.model_config
    shares = drafts_for_target(model_config, vllm_config)
    found = {
        "has {} in another shape than the model": list(_misshapen(tracker, model, vllm_config)),
        "lacks {}, which would leave parameters uninitialized": list(
            _lacking(tracker, model, shares)
        ),
        "has {}, which the model does not have": list(
            _left_over(tracker, model, vllm_config, format, model_config)
        ),
    }
    told = [text.format(shortened(names, 6)) for text, names in found.items() if names]
    if told:
        raise CheckpointError(
            f"{model_config.model} {'; it '.join(told)}. Its files do not match its config.json: "
            f"{CHECK_COMMAND}.{_of_text_only(model, tracker)}"
        )


def _of_text_only(model: torch.nn.Module, tracker: LoadTracker) -> str:
    """Tells how to serve files that have nothing of a model's encoders."""
    towers = tuple(f"{name}." for name in getattr(model, "_tower_model_names", ()))
    if not towers or any(place.startswith(towers) for place in tracker.places.values()):
        return ""
    return " They have no encoder of images or sound: --language-model-only serves their text."


def drafts_for_target(model_config: ModelConfig, vllm_config: VllmConfig) -> bool:
    """True for the drafter's model, which may use the target's embedding and LM head."""
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and model_config is not vllm_config.model_config
        and model_config is speculative.draft_model_config
    )


def _misshapen(
    tracker: LoadTracker, model: torch.nn.Module, vllm_config: VllmConfig
) -> Iterator[str]:
    """Tensors that were copied only in part, or into a parameter of another size."""
    modules = dict(model.named_modules())
    ranks = vllm_config.parallel_config.world_size_across_dp
    for name, copied in tracker.copied.items():
        shape = tracker.seen[name]
        module = modules.get(tracker.places[name].rpartition(".")[0])
        if getattr(module, "loads_shards", False):  # may read part of a tensor, or none
            continue
        if isinstance(module, VocabParallelEmbedding):  # the last ranks may hold few rows
            is_whole = shape[0] in (module.org_vocab_size, module.num_embeddings)
        else:
            is_whole = copied * ranks >= shape.numel()
        if name in tracker.spread or not is_whole:
            yield f"{name} {list(shape)}"


def _left_over(
    tracker: LoadTracker,
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    format: Format | None,
    model_config: ModelConfig,
) -> Iterator[str]:
    mappers = list(_mappers(model))
    skipped = (*_absent_parts(model), *_shards(model))
    # Layers after a model's last (multi-token prediction) are in its files but belong to another
    # model.
    is_after_last = (
        drafts_for_target(model_config, vllm_config)
        and model_config.model == vllm_config.model_config.model
    )
    # The target's, because vLLM sets num_hidden_layers of some drafters to 0.
    config = (vllm_config.model_config if is_after_last else model_config).hf_text_config
    depth = getattr(config, "num_hidden_layers", None)
    parallel = vllm_config.parallel_config
    own_layers = None
    if depth is not None and parallel.pipeline_parallel_size > 1:
        stages = get_pp_group()
        own_layers = range(*get_pp_indices(depth, stages.rank_in_group, stages.world_size))
    are_dealt_out = expert_layout(parallel, get_config(vllm_config)).ep_size > 1
    experts = model_config.get_num_experts() if are_dealt_out else 0
    of_own_experts = {_EXPERT.sub("*", name) for name in tracker.read} if experts else set()
    for name in (name for name in tracker.seen if name not in tracker.read):
        layer = _LAYER.search(name)
        if _DERIVED.search(name):
            continue
        if is_after_last and name.endswith(".embed_tokens.weight"):
            continue  # each layer has a copy, and vLLM reads one
        if depth is not None and (layer is not None and int(layer[1]) >= depth) != is_after_last:
            continue  # belongs to the other model
        if getattr(config, "tie_word_embeddings", False) and name.endswith("lm_head.weight"):
            continue
        if own_layers is not None and (layer is None or int(layer[1]) not in own_layers):
            continue  # another stage's, or without a layer number the first or last stage's
        expert = _EXPERT.search(name)
        is_of_other_rank = expert is not None and int(expert[1]) < experts
        if is_of_other_rank and _EXPERT.sub("*", name) in of_own_experts:
            continue
        if _is_folded_bias(name, format):
            continue
        own = _name_in_model(name, mappers)
        if own is None:
            continue  # the model declares that it does not need it
        if f"{name}.".startswith(skipped) or own.startswith(skipped):
            continue
        yield name


def _mappers(model: torch.nn.Module) -> Iterator[tuple[str, WeightsMapper]]:
    """The models' declared mappings of checkpoint names, each with its prefix, outer ones first."""
    for prefix, module in model.named_modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        if isinstance(mapper, WeightsMapper):
            yield f"{prefix}." if prefix else "", mapper


def _name_in_model(name: str, mappers: list[tuple[str, WeightsMapper]]) -> str | None:
    """Returns the vLLM name that all models around a parameter map a name to; None: not needed."""
    own = name
    for prefix, mapper in mappers:
        mapped = mapper.map_name(own.removeprefix(prefix))
        if mapped is None:
            return None
        # A model without a mapping may add a part's prefix itself, as vLLM's RoBERTa does.
        if own.startswith(prefix):
            own = f"{prefix}{mapped}"
    return own


def _absent_parts(model: torch.nn.Module) -> Iterator[str]:
    """Name prefixes of unused parts: encoders whose inputs are disabled by options, and an
    encoder's layers after the one whose output is used (LLaVA's vision_feature_layer)."""
    for name, module in model.named_modules():
        if isinstance(module, StageMissingLayer):
            yield f"{name}."
        layers = getattr(getattr(module, "encoder", None), "layers", None)
        depth = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if isinstance(layers, torch.nn.ModuleList) and isinstance(depth, int):
            for number in range(len(layers), depth):
                yield f"{name}.encoder.layers.{number}."


def _shards(model: torch.nn.Module) -> Iterator[str]:
    """Name prefixes of modules that read only a rank's rows of their tensors, or none."""
    for name, module in model.named_modules():
        if getattr(module, "loads_shards", False):
            yield f"{name}."


def _is_folded_bias(name: str, format: Format | None) -> bool:
    """True for a bias that is also folded into another tensor of its layer."""
    prefix, _, part = name.rpartition(".")
    if part != "bias" or format is None:
        return False
    kind = format.types.get(f"{prefix}.weight", "")
    return kind in SCHEMES and SCHEMES[kind].folds_bias


def _lacking(tracker: LoadTracker, model: torch.nn.Module, shares: bool) -> Iterator[str]:
    modules = dict(model.named_modules())
    for name, written, size in tracker.unfilled():
        prefix, _, part = name.rpartition(".")
        module = modules.get(prefix)
        if isinstance(module, NPURMSNorm) and part == "bias":
            continue  # not every norm has a bias
        num_rows = getattr(modules.get(prefix.rpartition(".")[0]), "in_proj_padding", 0)
        if num_rows and module is not None and size - written == num_rows * module.input_size:
            continue  # zero rows that only align a product of Kimi-K3
        if shares and not written and isinstance(module, VocabParallelEmbedding):
            continue  # vLLM replaces it with the target's
        method = getattr(module, "quant_method", None)
        if isinstance(method, BaseKVCacheMethod):
            continue  # vLLM's cache scales, which default to a value if the file has none
        if isinstance(
            method, QuantizedLinearMethodBase | QuantizedFusedMoEMethodBase
        ) and not method.takes_as_it_is(part):
            continue  # the method itself names missing tensors when it prepares its weights
        names = list(_parts_that_did_not_come(name, tracker.seen))
        share = "" if not written else f" ({size - written} of {size} entries)"
        yield from names or [f"{name}{share}"]


def _parts_that_did_not_come(name: str, seen: Iterable[str]) -> Iterator[str]:
    """Checkpoint names that vLLM merges into one parameter, except those that were loaded."""
    prefix, _, part = name.rpartition(".")
    parent, _, layer = prefix.rpartition(".")
    for of_layer in FUSED_LAYERS.get(layer, ()):
        own = f"{parent}.{of_layer}.{part}"
        if not _came(own, seen):
            yield own
    if layer == "experts" or part.startswith(tuple(_EXPERT_PARTS)):
        yield from _experts_that_did_not_come(prefix, part, seen)


def _experts_that_did_not_come(prefix: str, part: str, seen: Iterable[str]) -> Iterator[str]:
    group = next((group for group in _EXPERT_PARTS if part.startswith(group)), "w13_")
    last = part.removeprefix(group)
    pattern = re.compile(r"experts\.(\d+)\.(\w+)\." + re.escape(last) + "$")
    layer = _LAYER.search(f"{prefix}.")
    found = [
        (int(match[1]), match[2], name[: match.start()])
        for name in seen
        if (match := pattern.search(name))
        and (own := _LAYER.search(name))
        and layer
        and own[1] == layer[1]
    ]
    parts = {part for _, part, _ in found if part in _EXPERT_PARTS[group]}
    numbers = [number for number, _, _ in found]
    present = {(number, part) for number, part, _ in found}
    for number in range(min(numbers), max(numbers) + 1) if numbers else ():
        for part in sorted(parts):
            if (number, part) not in present:
                yield f"{found[0][2]}experts.{number}.{part}.{last}"


def _came(name: str, seen: Iterable[str]) -> bool:
    """True if a tensor was loaded, under the model's name or without a prefix that vLLM drops."""
    return name in seen or any(other.endswith(f".{name}") for other in seen)
