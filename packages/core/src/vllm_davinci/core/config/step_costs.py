"""Selects the step-time file by which an engine decides its steps, and checks that it fits.

Step times of another model, chip or layout would decide wrongly.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import platforms

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AGAIN = (
    "`vllm-davinci dry-run ... --step-costs FILE` with this engine's options writes one for it."
)
KEY = "step_costs"
AUTO = "auto"
# Options of `dbo` that decide about steps without step times.
_THRESHOLDS = ("min_total_tokens_to_split", "min_prefill_tokens_to_split")

# Sizes that differ between models of one architecture, with their names in configurations.
_SIZES = {
    "attention_heads": ("num_attention_heads",),
    "routed_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}

# Key of a step-time table. If true, the table's smallest sequence-parallel size holds for every
# value in the ranges of assumed figures: all larger steps are faster.
_OVER_RANGES = "sequence_parallel_over_ranges"
# Otherwise that size holds for the stated figures only. In every engine that was modelled both
# ways, the size for the whole ranges was at most this many times larger.
_OVER_RANGES_FROM = 4
SURELY_FASTER_SHARDED = 16384
"""Tokens from which sequence-parallel steps are faster for all values in the ranges of assumed
figures, in every engine of the shipped step-time tables. Smaller steps may be slower."""
SHARDED_FROM = "sequence_parallel.min_tokens"

logger = init_logger(__name__)


class CostsChoice(NamedTuple):
    """The step-time file of an engine, or None, and a clause that can follow "because"."""

    file: Path | None
    reason: str

    def setting(self) -> Setting:
        """The choice as shown in the log."""
        value = None if self.file is None else str(self.file)
        return Setting(KEY, value, Source.MODEL, self.reason)


def costs_file(config: DavinciConfig) -> Path | None:
    """The step-time file of an engine with resolved options, or None."""
    return None if config.step_costs in (None, AUTO) else Path(str(config.step_costs))


def ways_to_experts(config: DavinciConfig) -> list[str] | None:
    """The requested dispatch methods; None if step times may decide."""
    return None if config.moe_communication == AUTO else [config.moe_communication]


def choose_costs(vllm_config: "VllmConfig", config: DavinciConfig, may_make: bool) -> CostsChoice:
    """Chooses the step-time file of this engine.

    may_make: whether a missing file may be built
    Raises ConfigurationError if the requested file is missing or belongs to another engine.
    """
    if config.step_costs is None:
        return CostsChoice(None, "fixed rules were asked for")
    if config.step_costs != AUTO:
        refuse_costs_of_others(config.step_costs, vllm_config, config)
        return CostsChoice(Path(config.step_costs), "it was asked for")
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model is None or parallel.tensor_parallel_size * parallel.data_parallel_size == 1:
        return CostsChoice(None, "one rank has nothing to decide")
    given = [name for name in _THRESHOLDS if name in config.dbo.model_fields_set]
    if given:
        return CostsChoice(None, f"dbo.{given[0]} was given, which step times would replace")
    if parallel.data_parallel_size == 1 and config.moe_communication != AUTO:
        return CostsChoice(None, "moe_communication was given, and files model only 'auto'")
    provider = components.step_costs_provider()
    if provider is None:
        return CostsChoice(None, f"{components.COSTS.package} is not installed")
    engine = engine_of_costs(vllm_config, config)
    found = provider.find(engine)
    if found is not None:
        return CostsChoice(found, "it is for this model, chip and layout")
    if config.overlap != AUTO:
        return CostsChoice(None, "there is none for this engine, and `overlap` is not 'auto'")
    if not may_make:
        return CostsChoice(None, "there is none for this engine before its first start")
    logger.info(
        "overlap = 'auto': this engine's steps are modelled once, which takes half a minute "
        "or more; step_costs = null skips it."
    )
    options = list(_engine_options(vllm_config, config))
    return CostsChoice(*provider.make(engine, model.model, options))


def chosen_by_costs(file: Path) -> list[Setting]:
    """The options that were fastest when the file was built.

    Sequence parallelism begins where it is faster for all values in the ranges of assumed figures.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        options = dict(content["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{KEY} = {str(file)!r} has no options ({type(error).__name__}: {error}). {_AGAIN}"
        ) from error
    if SHARDED_FROM in options and not content.get(_OVER_RANGES):
        options[SHARDED_FROM] *= _OVER_RANGES_FROM
    return [
        Setting(key, value, Source.MODEL, f"the fastest, by {KEY}")
        for key, value in options.items()
    ]


def _engine_options(vllm_config: "VllmConfig", config: DavinciConfig) -> Iterator[str]:
    """Options of `vllm serve` that affect step times."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    yield f"--tensor-parallel-size={parallel.tensor_parallel_size}"
    yield f"--data-parallel-size={parallel.data_parallel_size}"
    if parallel.enable_expert_parallel:
        yield "--enable-expert-parallel"
    yield f"--dtype={str(model.dtype).removeprefix('torch.')}"
    if model.quantization:
        yield f"--quantization={model.quantization}"
    yield f"--max-num-seqs={scheduler.max_num_seqs}"
    yield f"--max-num-batched-tokens={scheduler.max_num_batched_tokens}"
    yield f"--max-model-len={model.max_model_len}"
    if compilation.cudagraph_mode is not None:
        yield f"-cc.cudagraph_mode={compilation.cudagraph_mode.name}"
    asked = config.model_dump(mode="json", exclude_unset=True)
    yield f"--additional-config={json.dumps({**asked, KEY: None})}"


def engine_of_costs(
    vllm_config: "VllmConfig", config: DavinciConfig
) -> dict[str, str | int | bool]:
    """Everything that step times depend on, by name, as stored in such a file."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    return {
        "architecture": model.architectures[0],
        "hidden_size": model.get_hidden_size(),
        "layers": int(text.num_hidden_layers),
        **{
            name: next((_largest(size) for key in keys if (size := getattr(text, key, None))), 0)
            for name, keys in _SIZES.items()
        },
        "quantization": str(model.quantization or "none"),
        "dtype": str(model.dtype).removeprefix("torch."),
        "chip": platforms.current_platform.get_device_name(),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "expert_tensor_parallel_size": 1
        if parallel.enable_expert_parallel
        else config.expert_tensor_parallel_size or parallel.tensor_parallel_size,
        "replays_decodes": replays_decodes(vllm_config),
        "order": "published" if config.overlap == "published" else "lean",
    }


def _largest(size: int | list[int]) -> int:
    """The size, or the largest of a list with one size per layer."""
    return max(size) if isinstance(size, list) else int(size)


def replays_decodes(vllm_config: "VllmConfig") -> bool:
    """True if graphs cover the engine's decodes."""
    from vllm.config import CUDAGraphMode  # vLLM imports this module first

    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode != CUDAGraphMode.NONE


def refuse_costs_of_others(path: str, vllm_config: "VllmConfig", config: DavinciConfig) -> None:
    """Raises ConfigurationError for a file that is missing or belongs to another engine."""
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(
            f"step_costs = {path!r} is not a file. `vllm-davinci dry-run --step-costs FILE` writes "
            "one."
        )
    try:
        stated: Any = json.loads(file.read_text(encoding="utf-8"))["engine"]
        made_for = dict(stated)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"step_costs = {path!r} does not say what engine it was made for "
            f"({type(error).__name__}: {error}). {_AGAIN}"
        ) from error
    differences = [
        f"{name} {made_for.get(name)!r}, here {value!r}"
        for name, value in engine_of_costs(vllm_config, config).items()
        if made_for.get(name) != value
    ]
    if differences:
        raise ConfigurationError(
            f"step_costs = {path!r} was made for another engine: {'; '.join(differences)}. {_AGAIN}"
        )
