"""Keys of `additional_config` in other Ascend plugins and earlier releases.

Each has a documented effect here: none is silently ignored.
Source: vllm-ascend's documentation of its additional configuration, 0.7 to 0.13.
"""

from typing import Any, Literal

from vllm_davinci.core.config.options import DYNAMIC, GRAPHS, NEEDS_GRAPHS
from vllm_davinci.core.config.row import Fate, Means, Needs, NoEffect, Refused, Row

CAPTURED_ONLY = "graphs are captured, and nothing is compiled"
FULL_GRAPHS = "Use -cc.cudagraph_mode of vLLM"
VLLM_SCHEDULES = "vLLM's own scheduler does it"
NOT_PRESENT = "this release does not have it"


def _elsewhere(key: str, today: str, type_: Any = bool) -> Row:
    """A key whose option has another name or section here."""
    return Row(
        key,
        type_,
        ...,
        f"Another plugin's spelling of {today}.",
        Refused("its option has another name here", f"Use {today}"),
    )


def _switch(key: str, meaning: str, fate: Fate, *needs: Needs) -> Row:
    """A key that is off by default."""
    return Row(key, bool, False, meaning, fate, needs)


GRAPH_KEYS = (
    _switch("enable_graph_mode", "Capture decode steps and replay them.", Means(GRAPHS)),
    Row(
        "init_torchair_graph_batch_sizes",
        bool,
        False,
        "Derive the sizes of graphs.",
        # Published commands give it together with enable_graph_mode = false.
        Means("torchair_graph_config.graph_batch_sizes_init", only_with=GRAPHS),
    ),
    _switch(
        "trace_recompiles",
        "Log why graphs are compiled again.",
        NoEffect("nothing is compiled; the log lists graphs when they are captured"),
    ),
    _switch(
        "torchair_graph_config.use_cached_graph",
        "Reuse a graph that an earlier run stored.",
        NoEffect(
            "graphs are captured at every start, and none is stored; it only allows "
            "torchair_graph_config.use_cached_kv_cache_bytes"
        ),
        NEEDS_GRAPHS,
    ),
    Row(
        "torchair_graph_config.enable_view_optimize",
        bool,
        True,
        "Fold views when compiling.",
        NoEffect("nothing is compiled"),
    ),
    _switch(
        "torchair_graph_config.enable_super_kernel",
        "Fuse consecutive kernels.",
        NoEffect("the host launches a captured step as a whole"),
        NEEDS_GRAPHS,
        Needs("torchair_graph_config.enable_multistream_moe", "needs enable_multistream_moe"),
    ),
    *(
        Row(
            key,
            bool,
            False,
            "Keep the KV cache of MLA in the NZ layout.",
            Refused("this release has no KV cache in the NZ layout"),
        )
        for key in ("torchair_graph_config.enable_kv_nz", "enable_kv_nz")
    ),
    Row(
        "torchair_graph_config.mode",
        str,
        ...,
        "Choose how the compiler optimizes.",
        Refused(CAPTURED_ONLY),
    ),
    Row(
        "torchair_graph_config.enable_frozen_parameter",
        bool,
        ...,
        "Treat weights as constants of the graph.",
        Refused("a captured graph reads its weights where they lie"),
    ),
    _elsewhere(
        "torchair_graph_config.enable_multistream_shared_expert",
        "torchair_graph_config.enable_multistream_moe",
    ),
    _elsewhere("enable_multistream_mla", "torchair_graph_config.enable_multistream_mla"),
    _elsewhere("enable_multistream_moe", "torchair_graph_config.enable_multistream_moe"),
    _elsewhere("enable_multistream_shared_expert", "torchair_graph_config.enable_multistream_moe"),
    _switch(
        "multistream_overlap_shared_expert",
        "Overlap shared experts with routed ones.",
        Means("torchair_graph_config.enable_multistream_moe"),
    ),
    _elsewhere("torchair_graph_batch_sizes", "torchair_graph_config.graph_batch_sizes", list[int]),
    _elsewhere("graph_batch_sizes", "torchair_graph_config.graph_batch_sizes", list[int]),
    _elsewhere("graph_batch_sizes_init", "torchair_graph_config.graph_batch_sizes_init"),
    _elsewhere("use_cached_graph", "torchair_graph_config.use_cached_graph"),
    _elsewhere("use_cached_kv_cache_bytes", "torchair_graph_config.use_cached_kv_cache_bytes"),
    *(
        Row(key, type_, ..., "Choose how graphs are compiled.", NoEffect(CAPTURED_ONLY))
        for key, type_ in (("ascend_compilation_config", dict), ("enable_npugraph_ex", bool))
    ),
    Row(
        "xlite_graph_config",
        dict,
        ...,
        "Choose another kind of graph.",
        Refused(CAPTURED_ONLY, FULL_GRAPHS),
    ),
)

SCHEDULER_KEYS = (
    _switch(
        "enable_inter_dp_scheduling",
        "Schedule across DP ranks.",
        NoEffect("it never had an effect"),
    ),
    _elsewhere("max_num_batched_tokens", "--max-num-batched-tokens of vLLM", int),
    _elsewhere("max_num_seqs", "--max-num-seqs of vLLM", int),
    Row(
        "ascend_scheduler_config.num_scheduler_steps",
        int,
        ...,
        "Schedule several decode steps at once.",
        Refused("vLLM no longer has steps of several tokens", "Use --async-scheduling of vLLM"),
    ),
    Row(
        "ascend_scheduler_config.delay_factor",
        float,
        ...,
        "Delay prompts, so that more of them share a step.",
        Refused("vLLM no longer delays prompts"),
    ),
    *(
        Row(
            f"ascend_scheduler_config.{name}",
            int,
            ...,
            "Limit the prompts that are prefilled in parts.",
            Refused(
                VLLM_SCHEDULES, "Use ascend_scheduler_config.enable_chunked_prefill, which takes it"
            ),
        )
        for name in ("max_num_partial_prefills", "max_long_partial_prefills")
    ),
    _elsewhere("ascend_scheduler_config.enable_pd_transfer", "--kv-transfer-config of vLLM"),
    _elsewhere("ascend_scheduler_config.decode_max_num_seqs", "--max-num-seqs of vLLM", int),
    *(
        Row(key, type_, ..., meaning, Refused(f"{NOT_PRESENT}; vLLM's own scheduler runs"))
        for key, type_, meaning in (
            ("enable_balance_scheduling", bool, "Balance prompts over DP ranks."),
            ("SLO_limits_for_dynamic_batch", int, "Limit the time between tokens, in ms."),
            ("profiling_chunk_config", dict, "Choose chunks of prompts by measured time."),
            ("scheduler_config", dict, "Choose one of several schedulers."),
        )
    ),
    _switch(
        "recompute_scheduler_enable",
        "Recompute preempted decodes on a prefill node.",
        NoEffect("the engine that preempts a request recomputes it"),
    ),
)

OVERLAP_KEYS = (
    Row(
        "dbo.num_micro_batches",
        int,
        2,
        "Number of ubatches of a split step.",
        Means("dbo.num_ubatches"),
    ),
    _elsewhere("enable_dbo", "dbo.enabled"),
    Row(
        "weight_prefetch_config.prefetch_ratio.mlp",
        dict,
        ...,
        "Fractions of a dense MLP's weights to prefetch.",
        NoEffect("weights of dense MLPs are not prefetched"),
    ),
    *(
        Row(key, bool, False, meaning, NoEffect(because))
        for key, meaning, because in (
            ("multistream_overlap_gate", "Run the router beside shared experts.", NOT_PRESENT),
            (
                "enable_async_exponential",
                "Draw the sampler's random numbers on another stream.",
                NOT_PRESENT,
            ),
            (
                "enable_flashcomm1",
                "Replace all-reduces by reduce-scatters and all-gathers.",
                "sequence_parallel decides it",
            ),
            (
                "enable_shared_expert_dp",
                "Keep shared experts whole on every rank.",
                "overlap decides how shared experts are reduced",
            ),
            (
                "enable_dsa_cp",
                "Divide prompts, not heads, among tensor-parallel ranks in sparse attention.",
                "heads are divided",
            ),
            (
                "enable_matmul_allreduce",
                "Fuse a row-parallel product with its all-reduce.",
                NOT_PRESENT,
            ),
        )
    ),
)

EXPERT_KEYS = (
    _switch("dynamic_eplb", "Balance experts while serving.", Means(DYNAMIC)),
    *(
        Row(key, int, 400, "Steps between two decisions.", Means("eplb_config.step_interval"))
        for key in ("num_iterations_eplb_update", "eplb_config.expert_heat_collection_interval")
    ),
    *(
        Row(
            key,
            int,
            30,
            "Steps to wait for a new map.",
            NoEffect("a step takes a new map as soon as every rank has it"),
        )
        for key in ("num_wait_worker_iterations", "eplb_config.algorithm_execution_interval")
    ),
    _switch(
        "gate_eplb",
        "Balance experts once only.",
        Refused("they are balanced repeatedly", "Raise eplb_config.step_interval"),
    ),
    _elsewhere("eplb_config.expert_map_path", "expert_map_path", str),
    Row(
        "eplb_config.num_redundant_expert",
        int,
        0,
        "Number of slots for replicas.",
        Means("eplb_config.num_redundant_experts"),
    ),
    *(
        Row(
            key,
            str,
            ...,
            "Write the newest map into a file.",
            Refused("maps are not written", "Remove the key; the log has each rank's load"),
        )
        for key in ("expert_map_record_path", "eplb_config.expert_map_record_path")
    ),
    Row(
        "eplb_config.eplb_policy_type",
        int,
        1,
        "Choose who decides where experts go.",
        Refused("vLLM's own policy decides"),
    ),
    Row(
        "enable_fused_mc2",
        int,
        0,
        "Fuse experts with their dispatch and combine.",
        Refused("this release does not fuse them", "Use moe_communication = 'fused'"),
    ),
    _switch(
        "enable_mc2_hierarchy_comm",
        "Send tokens between servers over RoCE.",
        Refused(NOT_PRESENT, "Use moe_communication"),
    ),
)

OTHER_KEYS: tuple[Row, ...] = (
    *GRAPH_KEYS,
    *SCHEDULER_KEYS,
    *OVERLAP_KEYS,
    *EXPERT_KEYS,
    _switch(
        "chunked_prefill_for_mla",
        "Use the fused operator for chunked prefills of MLA.",
        NoEffect("that operator is always used"),
    ),
    _switch(
        "enable_prefill_optimizations",
        "Use DeepSeek's prefill operators.",
        NoEffect("DeepSeek's prefill operators are always used"),
    ),
    Row(
        "enable_mlapo",
        bool,
        True,
        "Use one fused operator before the attention of MLA.",
        NoEffect("enable_compiled_operators decides which operators are used"),
    ),
    Row(
        "kv_cache_dtype",
        Literal["int8"],
        None,
        "Store the KV cache quantized.",
        Refused("this release has no quantized KV cache"),
    ),
    Row(
        "weight_nz_mode",
        int,
        ...,
        "Choose which weights are cast to the NZ layout.",
        Refused("its option has another name here", "Use enable_weight_nz_layout"),
    ),
    _elsewhere("lmhead_tensor_parallel_size", "lmhead_tp_size", int),
    Row(
        "finegrained_tp_config",
        dict,
        ...,
        "Give single layers a tensor parallel size of their own.",
        Refused("all layers are divided among the same ranks", "Use --tensor-parallel-size"),
    ),
    _switch(
        "enable_context_parallel",
        "Divide a prompt's tokens among ranks.",
        Refused(
            "prompts are not divided among ranks",
            "Use --decode-context-parallel-size, which divides their KV cache",
        ),
    ),
    _switch(
        "refresh",
        "Read the options anew although an engine exists.",
        NoEffect("options are read anew for every engine"),
    ),
    *(
        Row(key, type_, ..., meaning, Refused(NOT_PRESENT, "Use --profiler-config of vLLM"))
        for key, type_, meaning in (
            ("dump_config", dict, "Dump tensors with msprobe."),
            ("dump_config_path", str, "Dump tensors with msprobe."),
            ("msmonitor_use_daemon", bool, "Let msMonitor watch the engine."),
        )
    ),
)
