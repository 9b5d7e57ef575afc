"""Resolves everything that was requested into one typed configuration of this engine."""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_davinci.core.config.environment_variables import variables_without_effect
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.parsing import (
    KEYS_OF_VLLM,
    ResolvedOptions,
    flat,
    given_options,
    keys_given,
    non_default_options,
    serve_requests,
    validated,
)
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.config.step_costs import choose_costs
from vllm_davinci.core.features.overlap import chosen_by_preset, with_settings
from vllm_davinci.core.features.sequence_parallel import (
    ENABLED,
    check_sequence_parallel,
    reason_against_sequence_parallel,
)
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class Resolution(NamedTuple):
    """The options of one engine.

    requested: all options as requested by flags, variables, options and, for the rest, the preset
    config:    the same without what this engine does not support; layers and models read it
    warnings:  for the user, about options whose effect may surprise
    choices:   of `overlap = 'auto'`, each with its reason
    """

    requested: DavinciConfig
    config: DavinciConfig
    warnings: list[str]
    choices: list[Setting]


def resolve(
    vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ, may_make: bool = False
) -> Resolution:
    """Resolves an engine's options and stores them for `get_config`. Idempotent.

    may_make: whether missing step times may be modelled for `overlap` = 'auto', which takes half a
              minute
    Raises ConfigurationError for options that are unknown, ill-typed, contradictory or not in this
    release, and for explicitly requested ones that are impossible on this engine.
    """
    asked_for = vllm_config.additional_config
    if isinstance(asked_for, ResolvedOptions):
        return Resolution(asked_for.config, asked_for.config, [], [])
    given = given_options(asked_for)
    requests = serve_requests(given, vllm_config.parallel_config, environ)
    requested = validated(requests.given)
    unused = list(variables_without_effect(environ))
    against = reason_against_sequence_parallel(vllm_config)
    warnings = [
        *given.notes(),
        *requests.notes,
        *(f"{each.key}={each.value} {each.reason}." for each in unused),
        *check_sequence_parallel(requested, against),
    ]
    values = dict(flat(requested))
    settings = [
        Setting(key, values[key], Source.ADDITIONAL_CONFIG, _spelled(given.spelling, key))
        for key in keys_given(requested)
    ]
    settings += [*requests.settings, *given.without_effect, *unused]
    costs = choose_costs(vllm_config, requested, may_make)
    choices = chosen_by_preset(vllm_config, requested, against, costs.file)
    requested = with_settings(requested, choices)
    settings += choices
    if costs.file is not None:
        requested = requested.model_copy(update={"step_costs": str(costs.file)})
    if costs.file is not None or requested.overlap == "auto":
        settings.append(costs.setting())
    config = requested
    if against is not None:
        impossible = Setting(ENABLED, False, Source.MODEL, against)
        config = with_settings(requested, [impossible])
        settings.append(impossible)
    of_vllm = {key: value for key, value in given.options.items() if key in KEYS_OF_VLLM}
    asked = requested.model_dump(mode="json", exclude_unset=True)
    vllm_config.additional_config = ResolvedOptions({**of_vllm, **asked}, config, settings)
    decided = [choice for choice in choices if choice.source is Source.MODEL]
    return Resolution(requested, config, warnings, decided)


def _spelled(spelling: Mapping[str, str], key: str) -> str:
    return f"as {spelling[key]}" if key in spelling else ""


def log_resolution(
    resolution: Resolution, warnings: Iterable[str], changes: Iterable[Setting]
) -> None:
    """Logs the resolved configuration; changes: to vLLM's options."""
    for warning in warnings:
        logger.warning_once("%s", warning)
    for setting in [*resolution.choices, *changes]:
        logger.info_once("%s", setting.told())
    logger.info_once(
        "Effective vllm-davinci configuration: %s",
        # str, because vLLM hashes the arguments of info_once, and a dictionary is not hashable.
        str(non_default_options(resolution.requested) or "all options at their defaults"),
    )
