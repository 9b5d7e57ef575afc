"""From what was asked for to one typed configuration of this engine."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_davinci.core.config.aliases import older_keys
from vllm_davinci.core.config.dbo import gather_requests
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.parsing import KEYS_OF_VLLM, ResolvedOptions, parse_config
from vllm_davinci.core.config.schedule import Choice, chosen_by_schedule, with_choices
from vllm_davinci.core.config.sequence_parallel import (
    ENABLED,
    check_sequence_parallel,
    reason_against_sequence_parallel,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Resolution(NamedTuple):
    """The options of one engine.

    requested: by flags, variables and options, and by the schedule for those that are not given
    config:    the same, without what this engine cannot do: what layers and models read
    warnings:  for the user, about what has another effect than it seems to
    choices:   of the schedule, each with its reason
    """

    requested: DavinciConfig
    config: DavinciConfig
    warnings: list[str]
    choices: list[str]


def resolve(vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ) -> Resolution:
    """Resolves an engine's options and leaves them where `get_config` finds them. Idempotent.

    Raises ConfigurationError for what is unknown, ill-typed, contradictory, not in this release,
    or asked for by itself and impossible on this engine.
    """
    warnings = [
        f"additional_config key {key!r} {what}"
        for key, what in older_keys(vllm_config.additional_config).items()
    ]
    warnings += gather_requests(vllm_config, environ)
    requested = parse_config(vllm_config.additional_config)
    against = reason_against_sequence_parallel(vllm_config)
    warnings += check_sequence_parallel(requested, against)
    choices = chosen_by_schedule(vllm_config, requested, against)
    requested = with_choices(requested, choices)
    config = requested
    if against is not None:
        config = with_choices(requested, [Choice(ENABLED, False, against)])
    of_vllm = {
        key: value
        for key, value in (vllm_config.additional_config or {}).items()
        if key in KEYS_OF_VLLM
    }
    asked = requested.model_dump(mode="json", exclude_unset=True)
    vllm_config.additional_config = ResolvedOptions({**of_vllm, **asked}, config)
    told = [choice.told() for choice in choices if choice.reason]
    return Resolution(requested, config, warnings, told)
