"""The plugin's options: every working key of `--additional-config`, with type and meaning.

Keys of other plugins and releases, which have no effect or are refused, are rows of `other_keys`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from vllm_davinci.core.config.row import Needs

GRAPHS = "torchair_graph_config.enabled"
DYNAMIC = "eplb_config.dynamic_eplb"
NEEDS_GRAPHS = Needs(GRAPHS, f"is valid only when graph mode is enabled: set {GRAPHS}")


def _list_to_tuple(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list of integers")
    return tuple(value)


def _digits_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _text_to_bool(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


class _Options(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class GraphConfig(_Options):
    """Graphs of whole decode steps. The section's name is historical."""

    enabled: bool = False
    """Capture decode steps and replay them, as -cc.cudagraph_mode=FULL_DECODE_ONLY does. Excludes
    --enforce-eager."""
    use_cached_kv_cache_bytes: Annotated[
        bool,
        NEEDS_GRAPHS,
        Needs("torchair_graph_config.use_cached_graph", "needs use_cached_graph"),
    ] = False
    """Reuse the KV cache size measured by an earlier start with this configuration: vLLM's startup
    plan (VLLM_ENABLE_STARTUP_PLAN)."""
    graph_batch_sizes: Annotated[
        tuple[StrictInt, ...], BeforeValidator(_list_to_tuple), NEEDS_GRAPHS
    ] = ()
    """Batch sizes, in requests, to which decode steps are padded; --max-num-seqs is always added.
    An empty list means 1 and --max-num-seqs."""
    graph_batch_sizes_init: Annotated[
        bool,
        NEEDS_GRAPHS,
        Needs("torchair_graph_config.graph_batch_sizes", "excludes graph_batch_sizes: set one", ()),
    ] = False
    """Derive the sizes by doubling, from max(4, tensor parallel size)."""
    enable_multistream_mla: bool = False
    """Overlap MLA's vector work with its matrix work, in steps with decodes only. Works without
    graph mode."""
    enable_multistream_moe: bool = False
    """Overlap shared experts with routed ones. Works without graph mode."""
    on_capture_failure: Literal["fewer_sizes", "stop"] = "fewer_sizes"
    """Handling of a size that some rank cannot capture: run its steps in a larger size or eagerly
    (`fewer_sizes`), or fail the start (`stop`)."""


class SchedulerOptions(BaseModel):
    """Prefill-first scheduler. Other keys set the fields of that name in vLLM's SchedulerConfig."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, use_attribute_docstrings=True
    )

    enabled: bool = False
    """Schedule whole prompts before decodes. With enable_chunked_prefill = true vLLM's own
    scheduler runs and uses the other keys."""


class DualBatchConfig(_Options):
    """Dual-batch overlap: one ubatch computes while the other communicates."""

    enabled: bool = False
    """Split steps that become faster."""
    num_ubatches: int = Field(default=2, ge=2)
    """Number of ubatches of a split step."""
    min_total_tokens_to_split: int = Field(default=256, ge=0)
    """Steps with fewer scheduled tokens stay whole."""
    min_prefill_tokens_to_split: int = Field(default=64, ge=0)
    """Steps with fewer prefill tokens stay whole."""
    imbalance_ratio: float = Field(default=0.1, ge=0, le=1)
    """Largest distance of a cut from the middle, as a fraction of the step's tokens."""
    split: Literal["request", "token"] = "request"
    """Cut steps between requests only (`request`), or also inside a request (`token`)."""
    decode: bool = False
    """Split decode-only steps too."""
    min_decode_tokens_to_split: int = Field(default=32, ge=0)
    """Decode-only steps with fewer tokens stay whole."""
    token_alignment: Annotated[
        int,
        Needs(
            "dbo.split",
            "is for cuts inside requests, and dbo.split is 'request': set dbo.split to 'token', "
            "or remove the alignment",
            "token",
        ),
    ] = Field(default=1, ge=1)
    """Cuts inside requests fall on multiples of this number of tokens."""
    first_share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of a step's tokens in its first ubatch. Unset: all ubatches are equal."""
    norm_vector_cores: int | None = Field(default=None, ge=1)
    """Vector cores that norms of split steps may use: with few cores they leave memory bandwidth to
    the other ubatch's collective. Unset: this engine's step times choose for each size
    (`step_costs`), or norms use all cores."""


class SequenceParallelConfig(_Options):
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""

    enabled: bool = True
    """Use it in models whose definition is sequence parallel (vllm-davinci-models)."""
    min_tokens: int = Field(default=256, ge=1)
    """Steps with fewer tokens all-reduce: two small collectives take longer than one."""


class AttentionPrefetchRatio(_Options):
    """Fractions of attention's weights to prefetch."""

    qkv: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the weights before attention."""
    o: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the weights after attention."""


class ExpertsPrefetchRatio(_Options):
    """Fractions of an expert layer's weights to prefetch."""

    gate_up: float = Field(default=0.8, ge=0, le=1)
    """Fraction of the router, the shared experts and the routed experts' first product."""


class PrefetchRatio(_Options):
    """Fraction of each weight to prefetch, from its start."""

    attn: AttentionPrefetchRatio = AttentionPrefetchRatio()
    """Fractions of attention's weights."""
    moe: ExpertsPrefetchRatio = ExpertsPrefetchRatio()
    """Fractions of an expert layer's weights."""


class WeightPrefetchConfig(_Options):
    """Prefetch of weights into the chip's cache during all-reduces of decode steps."""

    enabled: bool = False
    """Prefetch the next layer's weights during a layer's all-reduce, in steps with decodes only,
    for models with MLA. Works without graph mode."""
    prefetch_ratio: PrefetchRatio = PrefetchRatio()
    """Fraction of each weight to prefetch, from its start."""
    max_bytes: int = Field(default=18 << 20, gt=0)
    """Upper limit per weight, in bytes. Unset: this engine's step times choose for each size
    (`step_costs`), if available."""
    min_bytes: int = Field(default=2 << 20, ge=0)
    """Layers with fewer bytes of weights in total are not prefetched: switching to another stream
    would take longer than it saves."""


class ExpertBalanceConfig(_Options):
    """Expert balancing (EPLB): moves busy experts to ranks with little load and adds replicas."""

    dynamic_eplb: bool = False
    """Move experts between ranks while serving, by their measured load (vLLM's EPLB). Needs
    --enable-expert-parallel."""
    num_redundant_experts: Annotated[
        int,
        Needs(DYNAMIC, f"needs {DYNAMIC}, or expert_map_path alone, whose file has the slots"),
    ] = Field(default=0, ge=0)
    """Slots for replicas, in addition to one slot per expert. All ranks have the same number."""
    step_interval: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(default=3000, gt=0)
    """Steps between two decisions; the first comes after a quarter of them."""
    window_size: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(default=1000, gt=0)
    """Number of steps before a decision whose load it uses."""
    use_async: Annotated[bool, Needs(DYNAMIC, f"needs {DYNAMIC}")] = False
    """Send weights during steps, one layer per step, instead of all between two steps."""
    communicator: Annotated[
        Literal["auto", "torch_nccl", "torch_gloo"], Needs(DYNAMIC, f"needs {DYNAMIC}")
    ] = "auto"
    """Transport of expert weights: `torch_nccl` (HCCL between devices) or `torch_gloo` (through the
    host; required by use_async). `auto`: HCCL if possible."""
    log_balancedness: Annotated[bool, Needs(DYNAMIC, f"needs {DYNAMIC}")] = False
    """Log the ratio of the mean load of ranks to the largest. Costs a collective and a wait."""
    log_balancedness_interval: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(
        default=1, gt=0
    )
    """Steps between two such log lines."""


class DavinciConfig(_Options):
    """Options of `--additional-config`."""

    torchair_graph_config: GraphConfig = GraphConfig()
    """Graphs of whole decode steps."""
    ascend_scheduler_config: SchedulerOptions = SchedulerOptions()
    """Prefill-first scheduler."""
    dbo: DualBatchConfig = DualBatchConfig()
    """Dual-batch overlap."""
    overlap: Literal["auto", "off", "published", "lean"] | None = None
    """Preset for all overlap options: `off`, `published` (the published figures), `lean` (the same
    with fewer all-reduces) or `auto` (chosen for this engine, reasons logged). Unset: each option
    applies as given."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""
    weight_prefetch_config: WeightPrefetchConfig = WeightPrefetchConfig()
    """Prefetch of weights into the chip's cache during all-reduces of decode steps."""
    expert_tensor_parallel_size: Annotated[int, BeforeValidator(_digits_to_int)] = Field(
        default=0, ge=0
    )
    """Ranks that share one expert. 0: the tensor parallel size. With --enable-expert-parallel
    experts are whole: 0 means 1, and larger values are refused."""
    expert_map_path: str | None = None
    """JSON file that assigns experts to ranks. Several ranks may hold the same expert."""
    eplb_config: ExpertBalanceConfig = ExpertBalanceConfig()
    """Expert balancing between ranks."""
    moe_communication: Literal["auto", "all_gather", "multicast", "all_to_all", "fused"] = "auto"
    """Dispatch method of experts; `auto` chooses per step and logs why."""
    step_costs: str | None = "auto"
    """Step-time table that decides how each step runs, dispatch method included
    (`moe_communication` = 'auto'). A path: a file written by `vllm-davinci dry-run
    --step-costs`. `auto`: the table shipped or built earlier for this model, chip and layout;
    with `overlap` = 'auto' it is built if absent.
    null: fixed rules. Fixed rules also decide without a table, and if `dbo` sets thresholds."""
    expert_piece_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per chunk of the routed experts. Larger steps run in chunks, bit-identical.
    Unset: what fits into a third of the memory left by the weights."""
    enable_weight_nz_layout: bool = False
    """Cast quantized weights to the NZ layout."""
    enable_compiled_operators: bool = True
    """Launch whole stages with the operators of vllm-davinci-kernels, if it is installed."""
    enable_cpu_binding: Annotated[bool, BeforeValidator(_text_to_bool)] = False
    """Bind each worker's threads to an equal share of the host's cores, in device order."""
    lmhead_tp_size: int = Field(default=-1, ge=-1)
    """Tensor parallel size of the LM head. Must equal that of the other layers: -1 and
    --tensor-parallel-size are accepted, other sizes are refused."""


# Preset -> dotted key -> value that it implies.
OVERLAP_PRESETS: dict[str, dict[str, bool]] = {
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
