"""Environment variables that core reads, each with meaning and default. There are few on purpose.

Options belong in `--additional-config`. The names below exist because people's scripts carry them
from earlier Ascend plugins: each is served or reported, none is passed over in silence. One is of
HCCL, which takes memory that core accounts for.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_davinci.core.errors import RELEASE, ConfigurationError


@dataclass(frozen=True)
class EnvironmentVariable:
    """One variable.

    name:    as the shell spells it
    default: the value that asks for nothing
    meaning: what it asks for
    """

    name: str
    default: str
    meaning: str


# Served: 1 is dbo.enabled (core.config.dbo).
OVERLAP_REQUESTS: tuple[EnvironmentVariable, ...] = (
    EnvironmentVariable("VLLM_ASCEND_ENABLE_DBO", "0", "dual-batch overlap"),
    EnvironmentVariable("VLLM_ENABLE_DBO", "0", "dual-batch overlap, in its early spelling"),
)

# Served: 1 is this value of moe_communication (core.fused_moe.options).
EXCHANGE_REQUESTS: dict[str, EnvironmentVariable] = {
    "all_gather": EnvironmentVariable(
        "VLLM_ENABLE_FUSED_EXPERTS_ALLGATHER_EP", "0", "all-gather expert parallelism"
    ),
    "all_to_all": EnvironmentVariable(
        "VLLM_ASCEND_ENABLE_MOE_ALL2ALL_SEQ", "0", "the sequence all-to-all dispatcher"
    ),
    "fused": EnvironmentVariable("VLLM_ENABLE_MC2", "0", "fused dispatch and combine of experts"),
}

# Without effect, which is reported.
INHERITED: tuple[EnvironmentVariable, ...] = (
    EnvironmentVariable("VLLM_ASCEND_TRACE_RECOMPILES", "0", "a log of graph recompilations"),
    EnvironmentVariable(
        "VLLM_ASCEND_MODEL_EXECUTE_TIME_OBSERVE", "0", "a log of the time of each stage"
    ),
    EnvironmentVariable(
        "VLLM_ASCEND_KV_CACHE_MEGABYTES_FLOATING_TOLERANCE",
        "64",
        "a tolerance, in MB, for cached KV sizes of graph mode",
    ),
    EnvironmentVariable(
        "VLLM_ASCEND_ENABLE_TOPK_TOPP_OPTIMIZATION", "0", "a faster top-k and top-p"
    ),
)


# Source: HCCL's documentation, environment variables.
HCCL_BUFFER = EnvironmentVariable(
    "HCCL_BUFFSIZE",
    "200",
    "MiB of the buffer of each group of ranks, which takes twice that of device memory",
)


def hccl_buffer_mib(environ: Mapping[str, str] = os.environ) -> int:
    """Of each group that has no size of its own. Raises ConfigurationError for what is no size."""
    text = environ.get(HCCL_BUFFER.name) or HCCL_BUFFER.default
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ConfigurationError(
            f"Environment variable {HCCL_BUFFER.name}={text!r} is not valid. It is a number of "
            f"MiB, at least 1, {HCCL_BUFFER.default} where it is not set: {HCCL_BUFFER.meaning}."
        )
    return int(text)


def check_inherited(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Notes about variables that are set and have no effect."""
    return [
        f"{variable.name}={environ[variable.name]} has no effect in {RELEASE}: it asks for "
        f"{variable.meaning}."
        for variable in INHERITED
        if environ.get(variable.name, variable.default) not in ("", variable.default)
    ]


def unknown_variables(vllms: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """What to say of each variable that begins as vLLM's do and is neither vLLM's nor one above.

    vllms: names of vLLM's
    """
    known = {*vllms, *(each.name for each in _inherited_variables())}
    return [
        f"Unknown environment variable {name}{_nearest(name, known)}"
        for name in sorted(environ)
        if name.startswith("VLLM_") and name not in known
    ]


def _inherited_variables() -> tuple[EnvironmentVariable, ...]:
    return (*OVERLAP_REQUESTS, *EXCHANGE_REQUESTS.values(), *INHERITED)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {close[0]}?" if close else "."
