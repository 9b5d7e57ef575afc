"""From what was asked for to one typed configuration of this engine."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_davinci.core.config.aliases import key_in_use, older_keys
from vllm_davinci.core.config.dbo import gather_requests
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.origins import NO_REQUESTS, Change, Origin, Requests, Source
from vllm_davinci.core.config.parsing import (
    KEYS_OF_VLLM,
    ResolvedOptions,
    given_options,
    parse_config,
)
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


def resolve(
    vllm_config: "VllmConfig",
    environ: Mapping[str, str] = os.environ,
    earlier: Requests = NO_REQUESTS,
) -> Resolution:
    """Resolves an engine's options and leaves them where `get_config` finds them. Idempotent.

    earlier: what other folders have moved into `additional_config` before
    Raises ConfigurationError for what is unknown, ill-typed, contradictory, not in this release,
    or asked for by itself and impossible on this engine.
    """
    asked_for = vllm_config.additional_config
    warnings = [
        *earlier.notes,
        *(f"additional_config key {key!r} {what}" for key, what in older_keys(asked_for).items()),
    ]
    gathered = gather_requests(vllm_config, environ)
    warnings += gathered.notes
    requested = parse_config(vllm_config.additional_config)
    origins = {
        key: Origin(Source.ADDITIONAL_CONFIG, _spelling(asked_for, key))
        for key in given_options(requested)
    }
    origins |= earlier.origins | gathered.origins
    against = reason_against_sequence_parallel(vllm_config)
    warnings += check_sequence_parallel(requested, against)
    choices = chosen_by_schedule(vllm_config, requested, against)
    requested = with_choices(requested, choices)
    origins |= {choice.key: _origin_of(choice, requested) for choice in choices}
    config = requested
    if against is not None:
        config = with_choices(requested, [Choice(ENABLED, False, against)])
        origins[ENABLED] = Origin(Source.MODEL, against)
    earlier_changes: list[Change] = []
    if isinstance(asked_for, ResolvedOptions):  # flags and variables have been moved before
        origins, earlier_changes = dict(asked_for.origins), asked_for.changes
    of_vllm = {
        key: value
        for key, value in (vllm_config.additional_config or {}).items()
        if key in KEYS_OF_VLLM
    }
    asked = requested.model_dump(mode="json", exclude_unset=True)
    resolved = ResolvedOptions({**of_vllm, **asked}, config, origins)
    resolved.changes += earlier_changes
    vllm_config.additional_config = resolved
    told = [choice.told() for choice in choices if choice.reason]
    return Resolution(requested, config, warnings, told)


def _spelling(additional_config: Any, key: str) -> str:
    """The key as the user wrote it, where that differs."""
    used = key_in_use(additional_config or {}, key)
    return "" if used == key else f"as {used}"


def _origin_of(choice: Choice, config: DavinciConfig) -> Origin:
    if config.overlap == "auto":
        return Origin(Source.MODEL, f"overlap = 'auto': {choice.reason}")
    return Origin(Source.ADDITIONAL_CONFIG, f"overlap = {config.overlap!r}")
