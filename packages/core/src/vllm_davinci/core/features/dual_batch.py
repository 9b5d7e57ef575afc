"""Dual-batch overlap: engines that cannot split steps, and options without effect."""

from collections.abc import Iterator

from vllm_davinci.core import components
from vllm_davinci.core.errors import ComponentError, ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature

ENABLED = "dbo.enabled"


def settle(engine: Engine) -> None:
    """Warns about options without effect.

    Raises ConfigurationError for an engine whose steps can never be split, and ComponentError if
    vllm-davinci-multistream is not installed.
    """
    options, max_tokens = engine.config.dbo, engine.vllm.scheduler_config.max_num_batched_tokens
    if options.num_ubatches > max_tokens:
        raise ConfigurationError(
            f"dbo.num_ubatches = {options.num_ubatches} is too large: steps have at most "
            f"{max_tokens} tokens. Lower it, or raise --max-num-batched-tokens."
        )
    if options.token_alignment * options.num_ubatches > max_tokens:
        raise ConfigurationError(
            f"dbo.token_alignment = {options.token_alignment} is too large: steps of at most "
            f"{max_tokens} tokens cannot be cut into {options.num_ubatches} parts. Lower it, or "
            "raise --max-num-batched-tokens."
        )
    if components.stream_scheduler() is None:
        package = components.STREAMS.package
        raise ComponentError(
            f"dbo.enabled needs {package}, which is not installed. `pip install {package}` adds it."
        )
    engine.warnings.extend(_warnings(engine, max_tokens))


def _warnings(engine: Engine, max_tokens: int) -> Iterator[str]:
    options, parallel = engine.config.dbo, engine.vllm.parallel_config
    if parallel.tensor_parallel_size == 1 and parallel.data_parallel_size == 1:
        yield (
            "dbo.enabled has nothing to overlap: one rank computes each layer alone. It takes "
            "effect with --tensor-parallel-size or expert parallelism."
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


def _idle_options(engine: Engine) -> list[str]:
    options = engine.config.dbo
    return [] if options.enabled else sorted(options.model_fields_set - {"enabled"})


def _warn_of_idle_options(engine: Engine) -> None:
    names = ", ".join(f"dbo.{name}" for name in _idle_options(engine))
    engine.warnings.append(f"{names} has no effect: dbo.enabled is false.")


FEATURES = (
    Feature(ENABLED, "dual-batch overlap", lambda e: e.config.dbo.enabled, settle=settle),
    Feature(
        "dbo.*",
        f"options of dual-batch overlap without {ENABLED}, which have no effect",
        lambda e: bool(_idle_options(e)),
        settle=_warn_of_idle_options,
    ),
)
