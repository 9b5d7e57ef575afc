"""Where vLLM leaves no hook: what core does instead, why, and when it can go.

None of these assigns to a vLLM module; tests/contract compares every module before and after.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """One deviation from vLLM's hooks."""

    what: str
    where: str
    why: str
    upstream: str
    goes_when: str


OVERRIDES: tuple[Override, ...] = (
    Override(
        what="torch.cuda.{Stream, Event, stream, current_stream, ...} name torch.npu's",
        where="core.device.torch_cuda_names",
        why="the V1 runner spells them out for asynchronous scheduling",
        upstream="vllm/v1/worker/gpu_model_runner.py, AsyncGPUModelRunnerOutput",
        goes_when="the V1 runner uses torch.Stream and torch.Event",
    ),
    Override(
        what="our input batch's block tables are of our class",
        where="core.attention.block_table",
        why="vLLM maps tokens to slots with a Triton kernel",
        upstream="vllm/v1/worker/block_table.py, BlockTable.compute_slot_mapping",
        goes_when="the kernel can be chosen by platform",
    ),
    Override(
        what="the runner allocates keys and values apart",
        where="core.model_runner",
        why="the fused attention operator takes two contiguous tensors",
        upstream="vllm/v1/worker/utils.py, allocate_kv_cache",
        goes_when="a KV cache layout can put keys before values",
    ),
    Override(
        what="a runner keeps its asynchronous output one step; a step that raised has no output",
        where="core.model_runner",
        why=(
            "ranks that report nothing free memory that a copy still reads, and an empty output "
            "hides the step's error behind a KeyError in the scheduler"
        ),
        upstream="vllm/v1/worker/gpu_model_runner.py, sample_tokens",
        goes_when="the worker keeps outputs until they are copied and passes None after an error",
    ),
    Override(
        what="with dbo.enabled, our runner shows vLLM ubatch_size or one DP rank during one call",
        where="core.ubatch.runner",
        why="a metadata builder per ubatch, and one exchange between DP ranks instead of two",
        upstream="vllm/v1/worker/gpu_model_runner.py, initialize_metadata_builders",
        goes_when="the number of builders and the exchange can be overridden by themselves",
    ),
    Override(
        what="with overlap on, experts' layers are entered by vLLM's plain functions, and keep "
        "shared results per ubatch",
        where="core.ubatch.moe_entry",
        why="a greenlet cannot be left inside a torch operator that is implemented in Python",
        upstream="vllm/model_executor/layers/fused_moe/runner/moe_runner.py, _select_forward",
        goes_when="the entry can be chosen by platform",
    ),
)
