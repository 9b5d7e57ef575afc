"""Every way to ask for dual-batch overlap, gathered in `additional_config["dbo"]`.

vLLM has flags of its own for it, which reach an implementation that is for CUDA. They are taken
over here and reset, before vLLM looks at them; earlier Ascend plugins had environment variables.
"""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_davinci.core import components
from vllm_davinci.core.config.aliases import canonical, key_in_use
from vllm_davinci.core.config.environment_variables import OVERLAP_REQUESTS
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.config.origins import NO_REQUESTS, Origin, Requests, Source
from vllm_davinci.core.errors import RELEASE, ComponentError, ConfigurationError
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# vLLM's flags, where they are in its ParallelConfig, their defaults there, and our option.
# A threshold that is given with its default value cannot be told from one that is not given.
THRESHOLDS = {
    "dbo_prefill_token_threshold": (512, "min_total_tokens_to_split"),
    "dbo_decode_token_threshold": (32, "min_decode_tokens_to_split"),
}


def gather_requests(vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ) -> Requests:
    """Moves flags and variables into `additional_config["dbo"]`.

    Idempotent; older keys get today's names. Raises ConfigurationError when a flag contradicts the
    option, or a variable does not parse; an option wins over a variable.
    """
    asked = vllm_config.additional_config or {}
    additional = canonical(asked)
    given = additional.get("dbo", {})
    if not isinstance(given, Mapping):
        return NO_REQUESTS  # the typed model names what is wrong
    options = dict(given)
    notes = []
    origins: dict[str, Origin] = {}
    for flag, name, value in _flags(vllm_config.parallel_config):
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"{flag} asks for dbo.{name} = {value!r} and additional_config sets "
                f"{key_in_use(asked, f'dbo.{name}')} to {given[name]!r}. Remove one of the two."
            )
        options[name] = value
        origins[f"dbo.{name}"] = Origin(Source.FLAG, flag)
        notes.append(f"{flag} is served as dbo.{name} = {value!r}.")
    _reset(vllm_config.parallel_config)
    for variable in _variables(environ):
        if additional.get("overlap") == "off":
            notes.append(f"{variable}=1 has no effect: additional_config sets overlap = 'off'.")
        elif "enabled" in given and not given["enabled"]:
            notes.append(f"{variable}=1 has no effect: additional_config sets dbo.enabled = false.")
        elif not options.get("enabled"):
            options["enabled"] = True
            origins["dbo.enabled"] = Origin(Source.VARIABLE, f"{variable}=1")
            notes.append(f"{variable}=1 is served as dbo.enabled = true; prefer that option.")
    vllm_config.additional_config = {**additional, "dbo": options} if options else additional
    return Requests(notes, origins)


def _flags(parallel: Any) -> Iterator[tuple[str, str, Any]]:
    """Flag as the user typed it, our option, its value."""
    if parallel.enable_dbo:
        yield "--enable-dbo", "enabled", True
    if parallel.ubatch_size > 1:
        flag = f"--ubatch-size {parallel.ubatch_size}"
        yield flag, "enabled", True
        yield flag, "num_ubatches", parallel.ubatch_size
    for field, (default, name) in THRESHOLDS.items():
        value = getattr(parallel, field)
        if value != default:
            yield f"--{field.replace('_', '-')} {value}", name, value


def _reset(parallel: Any) -> None:
    parallel.enable_dbo = False
    parallel.ubatch_size = 0
    for field, (default, _) in THRESHOLDS.items():
        setattr(parallel, field, default)


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    for variable in OVERLAP_REQUESTS:
        value = environ.get(variable.name, "")
        if value not in ("", "0", "1"):
            raise ConfigurationError(
                f"{variable.name}={value!r} is not valid: expected 0 or 1. Prefer "
                '--additional-config \'{"dbo": {"enabled": true}}\'.'
            )
        if value == "1":
            yield variable.name


def check_overlap(vllm_config: "VllmConfig", options: DualBatchConfig) -> list[str]:
    """Warnings for the user about overlap with this engine.

    Raises ConfigurationError for what can never be split, ComponentError without the package.
    """
    if not options.enabled:
        given = sorted(options.model_fields_set - {"enabled"})
        names = ", ".join(f"dbo.{name}" for name in given)
        return [f"{names} has no effect: dbo.enabled is false."] if given else []
    if vllm_config.speculative_config is not None:
        raise ConfigurationError(
            f"not available in {RELEASE}: dual-batch overlap with speculative decoding "
            f"(method {vllm_config.speculative_config.method!r}), whose draft model reads the "
            "hidden states of a whole step. Remove dbo.enabled or --speculative-config."
        )
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if options.num_ubatches > max_tokens:
        raise ConfigurationError(
            f"dbo.num_ubatches = {options.num_ubatches} parts cannot be made of steps "
            f"of at most {max_tokens} tokens. Lower it, or raise --max-num-batched-tokens."
        )
    if options.token_alignment * options.num_ubatches > max_tokens:
        raise ConfigurationError(
            f"dbo.token_alignment = {options.token_alignment} leaves no cut in steps of at most "
            f"{max_tokens} tokens, {options.num_ubatches} parts each. Lower it, or raise "
            "--max-num-batched-tokens."
        )
    if options.costs is not None and not os.path.isfile(options.costs):
        raise ConfigurationError(
            f"dbo.costs = {options.costs!r} is no file. `vllm-davinci dry-run --split-costs FILE` "
            "writes one."
        )
    if components.stream_scheduler() is None:
        package = components.STREAMS.package
        raise ComponentError(
            f"dbo.enabled needs {package}, which is not installed. `pip install {package}` adds it."
        )
    return list(_warnings(vllm_config, options, max_tokens))


def _warnings(
    vllm_config: "VllmConfig", options: DualBatchConfig, max_tokens: int
) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1 and parallel.data_parallel_size == 1:
        yield (
            "dbo.enabled has nothing to overlap: one rank computes each layer alone. It begins to "
            "work with --tensor-parallel-size or expert parallelism."
        )
    if options.min_total_tokens_to_split > max_tokens:
        yield (
            f"dbo.min_total_tokens_to_split = {options.min_total_tokens_to_split} is more than "
            f"--max-num-batched-tokens {max_tokens}: no step with a prefill will be split."
        )
    given = options.model_fields_set
    if "min_decode_tokens_to_split" in given and not options.decode:
        yield (
            "dbo.min_decode_tokens_to_split has no effect: steps without a prefill stay whole. "
            "Add dbo.decode = true to split them."
        )
    if "imbalance_ratio" in given and options.split == "token":
        yield (
            "dbo.imbalance_ratio has no effect: dbo.split is 'token', and a step is cut in its "
            "middle."
        )
