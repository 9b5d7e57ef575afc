"""Environment variables that core reads; few on purpose.

Options belong in `--additional-config`. Variables of other Ascend plugins are here because
scripts set them: each has a documented effect, and none is silently ignored. Two belong to HCCL
(buffer size, timeout) and one to torch_npu's allocator.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping

from vllm_davinci.core.config.row import Fate, Means, NoEffect, Row, Works
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError

DUAL_BATCH = Means("dbo.enabled", True)
NOT_PRESENT = NoEffect("this release does not have it")


def _switch(key: str, meaning: str, fate: Fate) -> Row:
    """A variable that is off by default."""
    return Row(key, bool, "0", meaning, fate)


# Source: vllm-ascend's envs.py, 0.7 to 0.13.
OTHER_VARIABLES: tuple[Row, ...] = (
    _switch("VLLM_ASCEND_ENABLE_DBO", "Dual-batch overlap.", DUAL_BATCH),
    _switch("VLLM_ENABLE_DBO", "Dual-batch overlap, in its early spelling.", DUAL_BATCH),
    _switch(
        "VLLM_ENABLE_FUSED_EXPERTS_ALLGATHER_EP",
        "All-gather expert parallelism.",
        Means("moe_communication", "all_gather"),
    ),
    _switch(
        "VLLM_ASCEND_ENABLE_MOE_ALL2ALL_SEQ",
        "The sequence all-to-all dispatcher.",
        Means("moe_communication", "all_to_all"),
    ),
    _switch(
        "VLLM_ENABLE_MC2", "Fused expert dispatch and combine.", Means("moe_communication", "fused")
    ),
    _switch(
        "VLLM_ASCEND_TRACE_RECOMPILES",
        "A log of graph recompilations.",
        NoEffect("nothing is compiled"),
    ),
    _switch(
        "VLLM_ASCEND_MODEL_EXECUTE_TIME_OBSERVE",
        "A log of the time of each stage.",
        NoEffect("profiles and timelines have these times"),
    ),
    Row(
        "VLLM_ASCEND_KV_CACHE_MEGABYTES_FLOATING_TOLERANCE",
        int,
        "64",
        "Tolerance, in MB, for cached KV sizes of graph mode.",
        NoEffect("vLLM's startup plan compares them"),
    ),
    _switch(
        "VLLM_ASCEND_ENABLE_TOPK_TOPP_OPTIMIZATION",
        "A faster top-k and top-p.",
        NoEffect("the sampler chooses its operators by itself"),
    ),
    Row(
        "VLLM_ASCEND_ENABLE_MLAPO",
        bool,
        "1",
        "One fused operator before the attention of MLA.",
        NoEffect("enable_compiled_operators decides which operators are used"),
    ),
    _switch(
        "VLLM_ASCEND_MLA_PA",
        "Paged attention's operator for MLA.",
        NoEffect("MLA has one attention operator"),
    ),
    Row(
        "VLLM_ASCEND_ENABLE_NZ",
        int,
        "1",
        "Which weights are cast to the NZ layout.",
        NoEffect("enable_weight_nz_layout decides it"),
    ),
    _switch(
        "VLLM_ASCEND_ENABLE_FLASHCOMM1",
        "Reduce-scatters and all-gathers instead of all-reduces.",
        NoEffect("sequence_parallel decides it"),
    ),
    *(
        Row(name, type_, default, meaning, NOT_PRESENT)
        for name, type_, default, meaning in (
            (
                "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE",
                int,
                "0",
                "A tensor parallel size of attention's last product.",
            ),
            (
                "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE",
                bool,
                "0",
                "Row-parallel products fused with their all-reduces.",
            ),
            ("VLLM_ASCEND_ENABLE_FUSED_MC2", int, "0", "Experts fused with dispatch and combine."),
            ("VLLM_ASCEND_BALANCE_SCHEDULING", bool, "0", "Prompts balanced over DP ranks."),
            ("VLLM_ASCEND_ENABLE_CONTEXT_PARALLEL", bool, "0", "Prompts divided among ranks."),
            (
                "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
                bool,
                "1",
                "One operator that transposes transferred blocks of the KV cache.",
            ),
            ("VLLM_ASCEND_LLMDD_RPC_IP", str, "0.0.0.0", "Address of a KV transfer's server."),
            ("VLLM_LLMDD_RPC_PORT", int, "5557", "Port of a KV transfer's server."),
            ("DYNAMIC_EPLB", bool, "false", "Experts balanced while serving."),
        )
    ),
    Row(
        "VLLM_VERSION",
        str,
        "",
        "The version that a vLLM built from its sources stands for.",
        NoEffect("each release is for the vLLM that its requirements name"),
    ),
)

# Source: HCCL's documentation, environment variables.
HCCL_BUFFER = Row(
    "HCCL_BUFFSIZE",
    int,
    "200",
    "Size of the buffer of each group of ranks, in MiB, at least 1. A group takes twice that of "
    "device memory.",
    Works(),
)

# Source: HCCL's documentation, environment variables.
HCCL_LIMIT = Row(
    "HCCL_EXEC_TIMEOUT",
    int,
    "three fifths of vLLM's VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300)",
    "Timeout of a collective that waits for a late rank, in seconds.",
    Works(),
)

FAULT_REPORT = Row(
    "DAVINCI_FAULT_REPORT",
    str,
    "one that the server names",
    "File in which the rank that ends an engine records the cause; the server reports it "
    "to its clients.",
    Works(),
)

# Source: torch_npu's documentation of its allocator.
ALLOCATOR = Row(
    "PYTORCH_NPU_ALLOC_CONF",
    str,
    "expandable_segments:True",
    "Settings of torch's allocator of device memory, which torch_npu reads. Segments are "
    "expandable unless it says otherwise.",
    Works(),
)


OWN, OF_VLLM = "own", "vllm"
TRITON_KERNELS = Row(
    "DAVINCI_TRITON_KERNELS",
    str,
    OWN,
    "`own`: compiled and torch_npu's operators replace the Triton kernels of vLLM's model "
    "runner. `vllm`: the runner launches its Triton kernels, which needs a Triton backend "
    "(`vnpu run --triton`, a Triton for Ascend).",
    Works(),
)


def launches_kernels_of_vllm(environ: Mapping[str, str] = os.environ) -> bool:
    """True if vLLM's Triton kernels are launched as they are. Raises ConfigurationError."""
    chosen = environ.get(TRITON_KERNELS.key) or OWN
    if chosen not in (OWN, OF_VLLM):
        raise ConfigurationError(
            f"Environment variable {TRITON_KERNELS.key}={chosen!r} is not valid: choose {OWN} (the "
            f"default) or {OF_VLLM}."
        )
    if chosen == OWN:
        return False
    from triton.runtime import driver  # already imported by vLLM, but not by every reader

    if not hasattr(driver.active, "launcher_cls"):
        raise ConfigurationError(
            f"Environment variable {TRITON_KERNELS.key}={OF_VLLM}: no Triton backend here executes "
            "kernels. Unset it, or start with `vnpu run --triton`, or with a Triton for Ascend."
        )
    return True


def hccl_buffer_mib(environ: Mapping[str, str] = os.environ) -> int:
    """HCCL buffer size of groups without their own, in MiB. Raises ConfigurationError."""
    text = environ.get(HCCL_BUFFER.key) or HCCL_BUFFER.default
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ConfigurationError(
            f"Environment variable {HCCL_BUFFER.key}={text!r} is not valid: expected a number of "
            f"MiB, at least 1. Its default is {HCCL_BUFFER.default}."
        )
    return int(text)


def variables_without_effect(environ: Mapping[str, str] = os.environ) -> Iterator[Setting]:
    """Variables of other plugins that are set and have no effect here."""
    for row in OTHER_VARIABLES:
        value = environ.get(row.key, "")
        if isinstance(row.fate, NoEffect) and value not in ("", row.default):
            yield Setting(row.key, value, Source.VARIABLE, row.fate.told())


def unknown_variables(vllms: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Messages about VLLM_ variables that are neither vLLM's nor listed above.

    vllms: names of vLLM's variables
    """
    known = {*vllms, *(row.key for row in OTHER_VARIABLES)}
    return [
        f"Unknown environment variable {name}{_nearest(name, known)}"
        for name in sorted(environ)
        if name.startswith("VLLM_") and name not in known
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {close[0]}?" if close else "."
