"""The plugin's options: every key of `--additional-config` that works, with type and meaning.

Keys of other plugins and releases, which do nothing or are refused, are rows of `other_keys`.
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
    """Reuse the KV cache size that an earlier start of this configuration measured: vLLM's startup
    plan (VLLM_ENABLE_STARTUP_PLAN)."""
    graph_batch_sizes: Annotated[
        tuple[StrictInt, ...], BeforeValidator(_list_to_tuple), NEEDS_GRAPHS
    ] = ()
    """Sizes to which decode steps are padded, in requests; --max-num-seqs is always added. An empty
    list stands for 1 and --max-num-seqs."""
    graph_batch_sizes_init: Annotated[
        bool,
        NEEDS_GRAPHS,
        Needs("torchair_graph_config.graph_batch_sizes", "excludes graph_batch_sizes: set one", ()),
    ] = False
    """Derive the sizes by doubling, from max(4, tensor parallel size)."""
    enable_multistream_mla: bool = False
    """Run the vector work of MLA beside its matrix work, in steps of decodes alone.
    Works without graph mode."""
    enable_multistream_moe: bool = False
    """Run shared experts beside routed ones. Works without graph mode."""
    on_capture_failure: Literal["fewer_sizes", "stop"] = "fewer_sizes"
    """Consequence of a size that cannot be captured on some rank: its steps run in a larger size or
    eagerly (`fewer_sizes`), or the start ends (`stop`)."""


class SchedulerOptions(BaseModel):
    """Prefill-first scheduler. Further keys set the fields of vLLM's SchedulerConfig with their
    names."""

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
    """Number of ubatches of a split step."""
    min_total_tokens_to_split: int = Field(default=256, ge=0)
    """Steps with fewer scheduled tokens stay whole."""
    min_prefill_tokens_to_split: int = Field(default=64, ge=0)
    """Steps with fewer prefill tokens stay whole."""
    imbalance_ratio: float = Field(default=0.1, ge=0, le=1)
    """Largest distance of a cut from the middle, as a fraction of the step's tokens."""
    split: Literal["request", "token"] = "request"
    """Cut a step between requests only (`request`), or also inside one (`token`)."""
    decode: bool = False
    """Split steps without a prefill too."""
    min_decode_tokens_to_split: int = Field(default=32, ge=0)
    """Steps without a prefill and with fewer tokens stay whole."""
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
    """Fraction of a step's tokens in its first ubatch. Where it is not set, all ubatches are
    equal."""
    norm_vector_cores: int | None = Field(default=None, ge=1)
    """Vector cores that norms of split steps may take: on few, they leave memory bandwidth to the
    collective of another ubatch. Where it is not set, durations of this engine's steps choose for
    each size (`step_costs`), or norms take all."""


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
    """Prefetch of weights into the chip's cache while decodes sum over ranks."""

    enabled: bool = False
    """Prefetch the next layer's weights while a layer's all-reduce occupies the links, in steps of
    decodes alone, for models with MLA. Works without graph mode."""
    prefetch_ratio: PrefetchRatio = PrefetchRatio()
    """Fraction of each weight to prefetch, from its start."""
    max_bytes: int = Field(default=18 << 20, gt=0)
    """Upper limit per weight, in bytes. Where it is not set, durations of this engine's steps
    choose for each size (`step_costs`), if there are any."""
    min_bytes: int = Field(default=2 << 20, ge=0)
    """Layers whose weights are fewer bytes in all are not prefetched: handing over to another
    stream would take longer than it saves."""


class ExpertBalanceConfig(_Options):
    """Balance of experts: those with many tokens move to ranks with few, and get replicas."""

    dynamic_eplb: bool = False
    """Move experts between ranks while serving, as the tokens of each say (vLLM's EPLB). Needs
    --enable-expert-parallel."""
    num_redundant_experts: Annotated[
        int,
        Needs(DYNAMIC, f"needs {DYNAMIC}, or expert_map_path alone, whose file has the places"),
    ] = Field(default=0, ge=0)
    """Places for replicas, beside one place for each expert. All ranks have as many places."""
    step_interval: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(default=3000, gt=0)
    """Steps from one decision to the next; the first comes after a quarter of them."""
    window_size: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(default=1000, gt=0)
    """Steps before a decision whose tokens count."""
    use_async: Annotated[bool, Needs(DYNAMIC, f"needs {DYNAMIC}")] = False
    """Send weights beside steps, one layer in each, instead of all between two steps."""
    communicator: Annotated[
        Literal["auto", "torch_nccl", "torch_gloo"], Needs(DYNAMIC, f"needs {DYNAMIC}")
    ] = "auto"
    """Way of the weights, by vLLM's names: HCCL between devices (`torch_nccl`), or through hosts
    (`torch_gloo`), which alone sends beside steps. `auto` takes HCCL where it may."""
    log_balancedness: Annotated[bool, Needs(DYNAMIC, f"needs {DYNAMIC}")] = False
    """Log the mean load of a rank over the largest of any. Costs a collective and a wait."""
    log_balancedness_interval: Annotated[int, Needs(DYNAMIC, f"needs {DYNAMIC}")] = Field(
        default=1, gt=0
    )
    """Steps between two such lines."""


class DavinciConfig(_Options):
    """Options of `--additional-config`."""

    torchair_graph_config: GraphConfig = GraphConfig()
    """Graphs of whole decode steps."""
    ascend_scheduler_config: SchedulerOptions = SchedulerOptions()
    """Prefill-first scheduler."""
    dbo: DualBatchConfig = DualBatchConfig()
    """Dual-batch overlap."""
    overlap: Literal["auto", "off", "published", "lean"] | None = None
    """Preset of every option that overlaps work: none (`off`), those of the published figures
    (`published`), the same with fewer reductions (`lean`), or a choice for this engine, whose
    reasons are logged (`auto`). Where it is not set, the single options say."""
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    """Sequence parallelism of tensor-parallel ranks between attention and MLP."""
    weight_prefetch_config: WeightPrefetchConfig = WeightPrefetchConfig()
    """Prefetch of weights into the chip's cache while decodes sum over ranks."""
    expert_tensor_parallel_size: Annotated[int, BeforeValidator(_digits_to_int)] = Field(
        default=0, ge=0
    )
    """Ranks that share one expert. 0 chooses the tensor parallel size. With
    --enable-expert-parallel experts are whole: 0 stands for 1, and a larger value is refused."""
    expert_map_path: str | None = None
    """JSON file that says which rank holds which expert. Several ranks may hold the same."""
    eplb_config: ExpertBalanceConfig = ExpertBalanceConfig()
    """Balance of experts between ranks."""
    moe_communication: Literal["auto", "all_gather", "multicast", "all_to_all", "fused"] = "auto"
    """Communication method between the ranks of experts; `auto` chooses per step and logs why."""
    step_costs: str | None = "auto"
    """Durations of this engine's steps, by which each step is decided, ways to the experts included
    (`moe_communication` = 'auto'): a file of `vllm-davinci dry-run --step-costs`, null for fixed
    rules, or `auto`: the file that has come with the package or that an earlier start made for this
    model, chip and layout, with `overlap` = 'auto' else a new one. Without a file, and where `dbo`
    states from how many tokens on steps are split, fixed rules decide."""
    expert_piece_tokens: int | None = Field(default=None, ge=1)
    """Most tokens whose rows the routed experts take at once. Larger steps run in pieces, with the
    same bits. Not set: a third of the memory beside the weights has room for the rows."""
    enable_weight_nz_layout: bool = False
    """Cast quantized weights to the NZ layout."""
    enable_compiled_operators: bool = True
    """Launch whole stages with the operators of vllm-davinci-kernels, where it is installed."""
    enable_cpu_binding: bool = False
    """Bind each worker's threads to an equal share of the host's cores, in the order of devices."""
    lmhead_tp_size: int = Field(default=-1, ge=-1)
    """Tensor parallel size of the LM head. It is that of the other layers: -1 and
    --tensor-parallel-size are accepted, other sizes are refused."""


# Preset -> dotted key -> the value that it stands for.
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
