"""The plugin's options: every key of `--additional-config` with type, default and meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt


def _list_to_tuple(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list of integers")
    return tuple(value)


def _digits_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class GraphConfig(_Options):
    """Whole-model decode graph. The key's name is historical."""

    enabled: bool = False
    """Capture decode steps and replay them, as -cc.cudagraph_mode=FULL_DECODE_ONLY does. Excludes
    --enforce-eager."""
    use_cached_graph: bool = False
    """Reuse a graph that an earlier run stored: graphs are captured at every start, whatever this
    says."""
    use_cached_kv_cache_bytes: bool = False
    """Reuse the KV cache size that an earlier start of this configuration measured: vLLM's startup
    plan (VLLM_ENABLE_STARTUP_PLAN). Needs use_cached_graph."""
    graph_batch_sizes: Annotated[tuple[StrictInt, ...], BeforeValidator(_list_to_tuple)] = ()
    """Padded decode sizes, in requests; --max-num-seqs is one of them. Empty: one, and that."""
    graph_batch_sizes_init: bool = False
    """Derive the sizes: doubling, from max(4, tensor parallel size). Excludes graph_batch_sizes."""
    enable_multistream_mla: bool = False
    """Run the vector work of MLA beside its matrix work, in steps of decodes alone.
    Works without graph mode."""
    enable_multistream_moe: bool = False
    """Run shared experts beside routed ones. Works without graph mode."""
    enable_view_optimize: bool = True
    """Fold views when compiling: nothing is compiled, whatever this says."""
    enable_kv_nz: bool = False
    """Blocked (NZ) layout of the KV cache of MLA: not in this release."""
    enable_super_kernel: bool = False
    """Fuse consecutive kernels. Needs enabled and enable_multistream_moe, and does nothing: the
    host launches a captured step as a whole."""
    on_capture_failure: Literal["fewer_sizes", "stop"] = "fewer_sizes"
    """When a size cannot be captured, on any rank: serve its steps in a larger one, or eagerly; or
    end the start."""


class SchedulerOptions(BaseModel):
    """Prefill-first scheduler. Further keys override SchedulerConfig fields of their names."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, use_attribute_docstrings=True
    )

    enabled: bool = False
    """Schedule whole prompts before decodes. With enable_chunked_prefill = true vLLM's own
    scheduler runs, with the other keys."""


class DualBatchConfig(_Options):
    """Dual-batch overlap: one ubatch computes while the other communicates."""

    enabled: bool = False
    """Split steps that gain from it."""
    num_ubatches: int = Field(default=2, ge=2)
    """Parts a step is split into."""
    min_total_tokens_to_split: int = Field(default=256, ge=0)
    """Steps with fewer scheduled tokens stay whole."""
    min_prefill_tokens_to_split: int = Field(default=64, ge=0)
    """Steps with fewer prefill tokens stay whole."""
    imbalance_ratio: float = Field(default=0.1, ge=0, le=1)
    """Largest distance of a cut from the middle, as a fraction of the step's tokens."""
    split: Literal["request", "token"] = "request"
    """Cut between requests only, or also inside one."""
    costs: str | None = None
    """JSON file with durations of steps, whole and split, as `vllm-davinci dry-run --split-costs`
    writes it for a chip: a step with a prefill is split where that is faster, whatever the two
    thresholds say."""
    decode: bool = False
    """Split steps without a prefill too."""
    min_decode_tokens_to_split: int = Field(default=32, ge=0)
    """Steps without a prefill and with fewer tokens stay whole."""
    token_alignment: int = Field(default=1, ge=1)
    """Cuts are at multiples of so many tokens. Needs split = "token"."""
    first_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of a step's tokens in its first ubatch. Not set: all ubatches are equal."""
    norm_vector_cores: int | None = Field(default=None, ge=1)
    """Vector cores that norms of split steps may take: on few, they leave memory to the collective
    of another ubatch. Not set: all."""


class SequenceParallelConfig(_Options):
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""

    enabled: bool = True
    """Use it in models whose definition is sequence parallel (vllm-davinci-models)."""
    min_tokens: int = Field(default=256, ge=1)
    """Steps with fewer tokens all-reduce: two small collectives take longer than one."""


class AttentionPrefetchRatio(_Options):
    """Of attention's weights."""

    qkv: float = Field(default=1.0, ge=0, le=1)
    """Of those before attention."""
    o: float = Field(default=1.0, ge=0, le=1)
    """Of those after it."""


class ExpertsPrefetchRatio(_Options):
    """Of a mixture's weights."""

    gate_up: float = Field(default=0.8, ge=0, le=1)
    """Of the routed experts' first product, the router and the shared experts."""


class PrefetchRatio(_Options):
    """Shares of weights."""

    attn: AttentionPrefetchRatio = AttentionPrefetchRatio()
    """Of attention's weights."""
    moe: ExpertsPrefetchRatio = ExpertsPrefetchRatio()
    """Of a mixture's weights."""


class WeightPrefetchConfig(_Options):
    """Weights that decodes read into the chip's cache under sums over ranks."""

    enabled: bool = False
    """Fetch the next layer's weights while a layer's sum over ranks has the links, in steps of
    decodes alone, of models with MLA. Works without graph mode."""
    prefetch_ratio: PrefetchRatio = PrefetchRatio()
    """How much of each weight, from its begin."""
    max_bytes: int = Field(default=18 << 20, gt=0)
    """Of one weight at most so many."""
    min_bytes: int = Field(default=2 << 20, ge=0)
    """Layers whose weights are fewer bytes in all are not fetched: that would gain less than
    handing over to another stream takes."""


class DavinciConfig(_Options):
    """Every key of `--additional-config`."""

    torchair_graph_config: GraphConfig = GraphConfig()
    """Whole-model decode graph."""
    ascend_scheduler_config: SchedulerOptions = SchedulerOptions()
    """Prefill-first scheduler."""
    dbo: DualBatchConfig = DualBatchConfig()
    """Dual-batch overlap."""
    overlap: Literal["auto", "off", "published", "lean"] | None = None
    """The schedule as a whole: nothing, the published one, the one with fewer reductions, or a
    choice for this engine, whose reasons are logged. Not set: the single options say."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""
    weight_prefetch_config: WeightPrefetchConfig = WeightPrefetchConfig()
    """Weights that decodes read into the chip's cache under sums over ranks."""
    expert_tensor_parallel_size: Annotated[int, BeforeValidator(_digits_to_int)] = Field(
        default=0, ge=0
    )
    """Ranks that share one expert. 0 chooses automatically: as many as share a tensor. With
    --enable-expert-parallel experts are whole: it stands for 1, and a larger value is refused."""
    expert_map_path: str | None = None
    """JSON file with a static placement of experts."""
    moe_communication: Literal["auto", "all_gather", "multicast", "all_to_all", "fused"] = "auto"
    """Communication method between the ranks of experts; auto chooses per step and logs why."""
    dynamic_eplb: bool = False
    """Balance experts while serving."""
    num_iterations_eplb_update: int = Field(default=400, gt=0)
    """Steps between two updates of the placement."""
    num_wait_worker_iterations: int = Field(default=30, gt=0)
    """Steps to wait for the placement's computation."""
    gate_eplb: bool = False
    """Collect expert loads in the gate."""
    chunked_prefill_for_mla: bool = False
    """Fused operator for chunked prefill of MLA: always used, whatever this says."""
    kv_cache_dtype: Literal["int8"] | None = None
    """Store the KV cache quantized."""
    enable_weight_nz_layout: bool = False
    """Cast quantized weights to the NZ layout."""
    enable_prefill_optimizations: bool = False
    """DeepSeek's prefill operators: always used, whatever this says."""
    enable_compiled_operators: bool = True
    """Launch whole stages with the operators of vllm-davinci-kernels, where it is installed."""
    enable_cpu_binding: bool = False
    """Bind each worker's threads to an equal share of the host's cores, in the order of devices."""
    lmhead_tp_size: int = Field(default=-1, ge=-1)
    """Tensor parallel size of the LM head alone; -1 uses the model's. Other sizes are refused."""
    refresh: bool = False
    """Read the options anew although an engine exists. Accepted; they always are."""


# Schedule -> dotted key -> the value that it stands for.
SCHEDULES: dict[str, dict[str, bool]] = {
    "off": {
        "dbo.enabled": False,
        "torchair_graph_config.enable_multistream_mla": False,
        "torchair_graph_config.enable_multistream_moe": False,
        "sequence_parallel.enabled": False,
    },
    "published": {
        "dbo.enabled": True,
        "torchair_graph_config.enable_multistream_mla": True,
        "torchair_graph_config.enable_multistream_moe": True,
        "sequence_parallel.enabled": False,
    },
    "lean": {
        "dbo.enabled": True,
        "torchair_graph_config.enable_multistream_mla": True,
        "torchair_graph_config.enable_multistream_moe": True,
        "sequence_parallel.enabled": True,
    },
}
