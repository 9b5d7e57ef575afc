"""Deviations where vLLM has no hook: what core does, why, and when the deviation can be removed.

None of them assigns to a vLLM module; tests/contract compares every module before and after, and
checks this table against the code on both sides (tests/contract/test_upstream_overrides.py).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """One deviation from vLLM's hooks.

    where:    modules of core that implement it, with class and methods if they override vLLM's
              private ones
    upstream: file of vLLM -> the names in it on which this depends
    """

    what: str
    where: tuple[str, ...]
    why: str
    upstream: dict[str, tuple[str, ...]]
    goes_when: str


RUNNER = "v1/worker/gpu/model_runner.py"
STATE = "v1/worker/gpu/model_states/default.py"

OVERRIDES: tuple[Override, ...] = (
    Override(
        what="torch.cuda.{Stream, Event, stream, current_stream, ...} point to torch.npu's",
        where=("core.device.torch_cuda_names:install",),
        why="the V2 runner hard-codes these names",
        upstream={
            "v1/worker/gpu/async_utils.py": ("torch.cuda.Event(blocking=True)",),
            "v1/worker/gpu/pp_utils.py": ("torch.cuda.Stream(",),
            "v1/worker/gpu/structured_outputs.py": ("torch.cuda.Stream(",),
        },
        goes_when="the V2 runner uses torch.Stream and torch.Event",
    ),
    Override(
        what="parts of the V2 runner are replaced when it assigns them to its attributes",
        where=(
            "core.runner.adoption:adopted",
            "core.runner.model_runner:NPUModelRunner",
            "core.worker:NPUWorker._make_model_runner",
            "core.runner.block_tables:NPUBlockTables",
            "core.runner.sampler:NPUSampler._sample_random",
            "core.runner.model_runner:NPUModelRunner._dummy_run",
            "core.runner.plain_steps:NPURequestState",
            "core.runner.model_state:NPUModelState",
            "core.runner.model_state:NPUEncoderRunner",
            "core.runner.model_state:NPUPromptEmbeds",
            "core.runner.prompt_logprobs:AdaptersPromptLogprobs",
            "core.runner.model_state:NPURopeState",
        ),
        why="the V2 runner hard-codes the classes of its parts; no platform chooses them",
        upstream={
            RUNNER: (
                "self.req_states = RequestState(",
                "self.input_buffers = InputBuffers(",
                "self.model_state = init_model_state(",
                "self.pp_handler = PPHandler(",
                "self.sampler = Sampler(",
                "self.prompt_logprobs_worker = PromptLogprobsWorker(",
                "with self.maybe_dummy_run_with_lora(",
                "self.block_tables = BlockTables(",
                "self.cudagraph_manager = ModelCudaGraphManager(",
                "self.kv_caches = [",
            ),
            "v1/worker/gpu/sample/sampler.py": ("def _sample_random",),
            "v1/worker/gpu/sample/prompt_logprob.py": (
                "self.uses_prompt_logprobs[idx_mapping_np]",
                "self.token_id_scores",
            ),
            STATE: ("self.rope_state.prepare_positions(", "self.prompt_embeds_state.apply("),
            "v1/worker/gpu/mm/rope.py": ("self.prefill_positions", "self.prefill_delta"),
        },
        goes_when="a platform can name the parts of the V2 runner",
    ),
    Override(
        what="the V2 runner's cache is laid out again in the memory that vLLM has allocated",
        where=(
            "core.runner.model_runner:NPUModelRunner.kv_caches",
            "core.runner.model_runner:NPUModelRunner._init_kv_zero_meta",
        ),
        why="vLLM's views cannot hold keys and values in two halves, which the operators require",
        upstream={
            RUNNER: ("kv_caches_dict = init_kv_cache(", "def _init_kv_zero_meta"),
            "v1/worker/utils.py": ("def allocate_kv_cache", "buf = torch.zeros(buf_size"),
        },
        goes_when="vLLM asks the attention backend for a layer's regions",
    ),
    Override(
        what="the V2 runner's request tables are copied only when they change",
        where=(
            "core.runner.buffers:CopiedTensor",
            "core.runner.buffers:IndexedWrites",
            "core.runner.buffers:leave_out_uva",
        ),
        why=(
            "vLLM assumes that all pinned memory is readable by the device, or copies whole tables"
        ),
        upstream={
            "utils/platform_utils.py": ("def is_uva_available", "is_pin_memory_available() or"),
            "v1/worker/gpu/buffer_utils.py": (
                "_staged_write_indices",
                "_staged_write_starts",
                "_staged_write_cu_lens",
                "self.pool = UvaBufferPool(",
            ),
        },
        goes_when="a platform can declare that its device cannot read host memory",
    ),
    Override(
        what="drafters of the V2 runner get corrected lengths after drafts are verified",
        where=(
            "core.runner.speculation:NPUDrafter._build_attn_metadata",
            "core.runner.speculation:NPUBlockDrafter.init_cudagraph_manager",
            "core.runner.speculation:NPUBlockDrafter.capture",
            "core.runner.speculation:NPUDraftModel._build_uniform_attn_metadata",
            "core.runner.speculation:NPUDraftModel._run_model",
            "core.runner.speculation:NPUModularDrafter._prepare_inputs",
            "core.runner.sampler:NPURejectionSampler._verify",
        ),
        why="vLLM has only an upper bound of lengths on the host, and the fused attention "
        "operator needs exact lengths; its draft models have no graphs, and its MTP of several "
        "modules reads rows before the first token of a short prompt",
        upstream={
            RUNNER: (
                "self.speculator = init_speculator(",
                "self.rejection_sampler = RejectionSampler(",
                "def postprocess_sampled",
            ),
            "v1/worker/gpu/spec_decode/speculator.py": (
                "def _build_attn_metadata",
                "def _build_uniform_attn_metadata",
            ),
            "v1/worker/gpu/spec_decode/standalone_ar/speculator.py": ("def _run_model",),
            "v1/worker/gpu/spec_decode/dflash/speculator.py": (
                "def init_cudagraph_manager",
                "def capture",
            ),
            "v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py": ("def _prepare_inputs(",),
            "v1/worker/gpu/spec_decode/rejection_sampler.py": ("def _verify(",),
        },
        goes_when="vLLM keeps exact lengths on the host if an attention backend requests them",
    ),
    Override(
        what="steps of the V2 runner run as ubatches without vLLM's knowledge",
        where=("core.runner.ubatches:StepPlans", "core.runner.model_state:NPUModelState"),
        why="vLLM's ubatches are two equal parts in threads, only with data parallelism",
        upstream={
            RUNNER: ("self.model_state.prepare_attn(", "model_output = self.model(**model_inputs)"),
            "v1/worker/gpu/ubatch_utils.py": ("def _slice_input_batch",),
        },
        goes_when="a platform can name the class that plans and runs the parts of a step",
    ),
    Override(
        what="the V2 runner's graphs are torch_npu's, with lengths updated before a replay",
        where=(
            "core.runner.graphs:NPUGraphManager",
            "core.runner.step_graphs:StepGraphs",
            "core.runner.model_runner:NPUModelRunner._init_minimal_kv_cache_for_profiling",
            "core.runner.model_runner:NPUModelRunner._cleanup_profiling_kv_cache",
        ),
        why="vLLM captures torch.cuda's graphs, and passes nothing of a step to its replay",
        upstream={
            "v1/worker/gpu/cudagraph_utils.py": (
                "torch.cuda.CUDAGraph()",
                "super().capture(create_forward_fn, progress_bar_desc)",
                "super().run_fullgraph(desc)",
                "def _init_minimal_kv_cache_for_profiling",
                "def _teardown_profiling_state",
                "self._capture_descs",
                "self._candidates",
            )
        },
        goes_when="vLLM gets its graphs from the platform",
    ),
    Override(
        what="the offloading connector's worker gets both parts of every layer's cache",
        where=("core.kv_offload.connector:NPUOffloadingConnector.register_kv_caches",),
        why="vLLM takes one tensor per layer for whole pages, and would store only keys",
        upstream={
            "distributed/kv_transfer/kv_connector/v1/offloading/worker.py": (
                "def register_kv_caches",
                "def _init_worker",
                "CanonicalKVCaches(",
            ),
            "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": (
                "self.connector_worker = OffloadingConnectorWorker(",
            ),
        },
        goes_when="vLLM asks the attention backend for a layer's regions",
    ),
    Override(
        what="disaggregated prefill sends whole prompts from the host, as pages with checksums",
        where=(
            "core.kv_transfer.scheduler:NPUNixlScheduler._build_save_meta",
            "core.kv_transfer.worker:NPUNixlWorker._pop_done_transfers",
            "core.kv_transfer.worker:NPUNixlWorker._read_blocks_for_req",
            "core.kv_transfer.worker:NPUNixlWorker._validate_remote_agent_handshake",
        ),
        why="vLLM sends only the first part of a block that two chunks of a prompt share, only "
        "keys of our caches, and reads blocks that were given to another request",
        upstream={
            "distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py": (
                "def _build_save_meta",
                "_reqs_need_save",
                "_reqs_need_recv",
            ),
            "distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py": (
                "def initialize_host_xfer_buffer",
                "def save_kv_to_host",
                "def sync_recved_kv_to_device",
                "def _pop_done_transfers",
                "def _handle_failed_transfer",
                "def _validate_remote_agent_handshake",
                "storage_is_block_major",
            ),
            "distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py": (
                "def _read_blocks_for_req",
            ),
        },
        goes_when="vLLM saves partly written blocks again, verifies received blocks, and asks the"
        " attention backend for a layer's regions",
    ),
    Override(
        what="blocks received over Mooncake are complete or fail, and every wait has a timeout",
        where=("core.kv_transfer.mooncake_worker:NPUMooncakeWorker._handle_failed_recv",),
        why="vLLM does not verify received blocks, waits minutes for an ended worker and forever "
        "for a dropped prompt, and never looks up a worker twice",
        upstream={
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py": (
                "def _handle_failed_recv",
                "_invalid_block_ids",
                "_reqs_need_recv[request.request_id] = (request, local_block_ids)",
                "self._reqs_need_send[request.request_id] = (",
                "local_group = local_group[-n_remote:]",
                "_remote_agents",
                "pull_tasks_count",
                "assert not send_meta.ready.is_set()",
                "use_packed_row = (",
            )
        },
        goes_when="vLLM verifies received blocks, asks the attention backend for a layer's "
        "regions, and answers every request that was sent to a worker",
    ),
    Override(
        what="models that vLLM defines per vendor are refused by name",
        where=("core.config.architectures:is_foreign",),
        why="vLLM gives other platforms CUDA's definitions, which fail in some layer or on import",
        upstream={"model_executor/models/registry.py": ("vllm.models.deepseek_v32", "module_name")},
        goes_when="vLLM's registry states the platforms of a definition",
    ),
    Override(
        what="block tables of hybrid models (recurrent state) count twice the operator's blocks "
        "per page",
        where=("core.kv_cache.shared_pages:address_pages",),
        why="vLLM has that factor only for its packed caches; docs/decisions/0014",
        upstream={
            "v1/worker/utils.py": (
                "def map_to_kernel_block_table",
                "self.kernel_block_stride or blocks_per_kv_block",
                "kernel_block_offsets",
            )
        },
        goes_when="an attention backend can state the distance between its cache's blocks",
    ),
    Override(
        what="linear attention layers keep vLLM's projections and weights, and compute in torch",
        where=(
            "core.linear_attention.gated_delta_net:NPUQwenGatedDeltaNetAttention",
            "core.linear_attention.kimi_delta_attention:NPUKimiGatedDeltaNetAttention",
            "core.linear_attention.mamba2:NPUMambaMixer2",
        ),
        why="vLLM's stages between the projections are Triton kernels",
        upstream={
            "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": (
                "def fix_query_key_value_ordering",
                "def _output_projection",
                "def split_ba",
            ),
            "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py": (
                "self.in_proj_qkvgfab",
                "self.f_b_proj",
                "self.g_b_proj",
            ),
            "model_executor/layers/mamba/mamba_mixer2.py": (
                "self.tped_conv_size",
                "self.split_hidden_states_B_C_fn",
                "hidden_states = self.norm(ssm_output, gate)",
            ),
        },
        goes_when="the stages are operators that a platform can replace",
    ),
    Override(
        what="the builder of linear attention's metadata nominally subclasses one of vLLM's",
        where=("core.linear_attention.metadata:LinearAttentionMetadataBuilder.build",),
        why="vLLM tells only its own classes which drafts were accepted",
        upstream={
            "v1/worker/gpu/model_states/mamba_hybrid.py": (
                "GDNAttentionMetadataBuilder,",
                "num_decode_draft_tokens_cpu",
            )
        },
        goes_when="vLLM tells every builder",
    ),
    Override(
        what="experts without gates are created under another activation's name",
        where=("core.fused_moe.layer:NPURoutedExperts.__init__",),
        why="vLLM's description of experts refuses them except on CUDA, ROCm and XPU",
        upstream={
            "model_executor/layers/fused_moe/config.py": (
                "is_act_and_mul=False is supported only for",
            ),
            "model_executor/models/nemotron_h.py": (
                "activation=activation_without_mul(config.mlp_hidden_act)",
            ),
        },
        goes_when="vLLM asks the platform",
    ),
    Override(
        what="Triton kernels are replaced by torch operators",
        where=("core.triton_kernels.registration:STAND_INS",),
        why="vLLM has no other path; its platform hook maps kernel paths to stand-ins, and "
        "installs them in its own modules",
        upstream={"triton_utils/dispatcher.py": ("def register_kernels",)},
        goes_when="an NPU runs them",
    ),
    Override(
        what="layers with adapters get our layout, and adapters that do not fit are refused",
        where=(
            "core.lora.adapter_manager:NPULoRAModelManager._create_lora_modules",
            "core.lora.adapter_manager:NPUWorkerLoRAManager._load_adapter",
            "core.lora.routed_experts:FusedMoEWithLoRA._create_lora_a_weights",
            "core.lora.routed_experts:FusedMoEWithLoRA._create_lora_b_weights",
        ),
        why="vLLM skips layers that it cannot wrap, and copies tensors of too small a shape",
        upstream={
            "lora/model_manager.py": ("_create_lora_modules", "It will be ignored."),
            "lora/worker_manager.py": ("_load_adapter", "_manager_cls"),
            "lora/layers/fused_moe.py": ("_create_lora_a_weights", "_create_lora_b_weights"),
        },
        goes_when="vLLM refuses adapters that it would ignore in part",
    ),
    Override(
        what="load_weights of a model with adapters finds layers inside their wrappers",
        where=("core.lora.adapter_manager:load_past_wrappers",),
        why="some of vLLM's models look parameters up by checkpoint names, into which wrappers "
        "insert base_layer; some trainers insert it themselves",
        upstream={
            "lora/layers/base.py": ("def load_weights", "base_layer"),
            "model_executor/models/deepseek_v2.py": ("param = params_dict[name]",),
        },
        goes_when="every model's load_weights accepts names with and without base_layer",
    ),
    Override(
        what="a trainer's tensors share our buffers, which it sends over HCCL and waits for",
        where=(
            "core.weight_transfer.hccl_engine:HCCLTrainerWeightTransferEngine._broadcast",
            "core.weight_transfer.hccl_engine:HCCLTrainerWeightTransferEngine._post_send_sync",
        ),
        why="vLLM's engine uses torch.cuda's streams there",
        upstream={"distributed/weight_transfer/nccl_engine.py": ("_broadcast", "_post_send_sync")},
        goes_when="vLLM's engine takes its streams from the platform",
    ),
    Override(
        what="a trainer's tensors are packed into our buffers, in memory that workers map",
        where=(
            "core.weight_transfer.ipc_engine:NPUIPCTrainerWeightTransferEngine._send",
            "core.weight_transfer.ipc_engine:NPUIPCTrainerWeightTransferEngine._post_send_sync",
        ),
        why="vLLM's engine uses torch.cuda's devices and memory there",
        upstream={"distributed/weight_transfer/ipc_engine.py": ("_send", "_post_send_sync")},
        goes_when="vLLM's engine takes its device from the platform",
    ),
    Override(
        what="the expert balancing state records the layer whose weights a step moves",
        where=("core.expert_balance.state:NPUEplbState._all_ranks_result_ready",),
        why="our layers look experts up in their own tables, and vLLM does not report moves",
        upstream={
            "distributed/eplb/eplb_state.py": (
                "eplb_model_state.rebalanced and self._all_ranks_result_ready(",
                "_move_to_workspace(",
            )
        },
        goes_when="vLLM's step reports the layers it has moved",
    ),
    Override(
        what="models get indices of encoder tokens on the device instead of a mask on the host",
        where=("core.runner.model_state:NPUModelState.gather_mm_embeddings",),
        why="indexing a device tensor with a mask on the host waits for the device",
        upstream={STATE: ("def gather_mm_embeddings",)},
        goes_when="vLLM computes the indices on the host",
    ),
    Override(
        what="the runner holds its asynchronous output for one step",
        where=("core.runner.model_runner:NPUModelRunner.sample_tokens",),
        why="ranks that report nothing free memory that a copy still reads",
        upstream={RUNNER: ("def sample_tokens", "async_output = AsyncOutput(")},
        goes_when="the worker holds outputs until they are copied",
    ),
    Override(
        what="memory pools are not used",
        where=("core.worker:NPUWorker._maybe_get_memory_pool_context",),
        why="vLLM asks for CUDA's allocator",
        upstream={"v1/worker/gpu_worker.py": ("_maybe_get_memory_pool_context",)},
        goes_when="it asks the platform",
    ),
    Override(
        what="a worker is created without a profiler, and gets the requested one afterwards",
        where=("core.worker:NPUWorker.__init__",),
        why="vLLM refuses every profiler on devices missing from its own table",
        upstream={
            "v1/worker/gpu_worker.py": ("validate_worker_profiler_config(self.profiler_config)",),
            "profiler/wrapper.py": ("_SUPPORTED_PROFILER_KINDS", "Unsupported profiler device"),
        },
        goes_when="the platform names the profilers of its devices",
    ),
    Override(
        what="the host keeps its threads if they compute for virtual devices",
        where=("core.worker:NPUWorker.load_model",),
        why="vLLM leaves a process with a loaded model one thread",
        upstream={"v1/worker/gpu_worker.py": ("set_torch_threads_for_runtime()",)},
        goes_when="vLLM asks the platform for the number of threads",
    ),
    Override(
        what="with overlap on, our runner shows vLLM ubatch_size during one call",
        where=("core.ubatch.splitter:StepSplitter.builder_per_ubatch",),
        why="metadata builders keep state of their batch: each ubatch needs its own",
        upstream={"v1/worker/gpu/attn_utils.py": ("num_metadata_builders",)},
        goes_when="the number of builders can be overridden",
    ),
    Override(
        what="with overlap on, expert layers are entered by vLLM's plain functions, and store "
        "shared results per ubatch",
        where=("core.ubatch.moe_entry:let_experts_switch",),
        why="a greenlet cannot switch inside a torch operator that is implemented in Python",
        upstream={
            "model_executor/layers/fused_moe/runner/moe_runner.py": (
                "_forward_entry",
                "_moe_forward",
                "_moe_forward_shared",
            )
        },
        goes_when="a platform can choose the entry",
    ),
    Override(
        what="the factor of a routed sum moves from the layer's runner into experts' weights",
        where=("core.fused_moe.method:_take_factor_of_sum",),
        why="the runner multiplies the sum by it, a launch over all rows of a step",
        upstream={
            "model_executor/layers/fused_moe/runner/moe_runner.py": ("self.routed_scaling_factor",)
        },
        goes_when="a method that selects experts itself is asked to apply the factor",
    ),
    Override(
        what="a file places experts on ranks",
        where=("core.fused_moe.expert_map_manager:NPUExpertMapManager._calculate_expert_maps",),
        why="vLLM supports two placements, linear and round robin",
        upstream={
            "model_executor/layers/fused_moe/expert_map_manager.py": ("_calculate_expert_maps",)
        },
        goes_when="a placement can be registered",
    ),
    Override(
        what="quantized experts without a method for NPUs end the start with their format's name",
        where=("core.fused_moe.layer:NPURoutedExperts._get_quant_method",),
        why="vLLM raises NotImplementedError while choosing among CUDA's kernels",
        upstream={"model_executor/layers/fused_moe/routed_experts.py": ("_get_quant_method",)},
        goes_when="the choice of experts' methods asks the platform",
    ),
    Override(
        what="all2all_backend is set to a value that selects none of our dispatch methods",
        where=("core.features.every_engine:settle",),
        why=(
            "vLLM's models divide tokens among the ranks of a DP rank with the default, and read "
            "padding in steps of one token"
        ),
        upstream={
            "config/parallel.py": ("use_sequence_parallel_moe", "flashinfer_nvlink_two_sided")
        },
        goes_when="a platform can refuse the division",
    ),
    Override(
        what="images longer than the window have bidirectional attention",
        where=("core.features.bidirectional:settle",),
        why="vLLM excludes them except for models whose definition says otherwise",
        upstream={STATE: ("mm_prefix_clamp_sliding_window",)},
        goes_when="the definitions of the models that we serve declare it",
    ),
    Override(
        what="a whole prompt attends bidirectionally, if the model is defined so",
        where=("core.attention.metadata:NPUAttentionMetadataBuilder.build",),
        why="vLLM tells attention only about images, and PaliGemma's text before the answer also "
        "attends bidirectionally; in HRM-Text, vLLM lets answers attend so after a preemption",
        upstream={STATE: ("mm_req_doc_ranges", "self.model_config.is_mm_prefix_lm")},
        goes_when="vLLM's ranges include the prompt",
    ),
    Override(
        what="the prefill-first scheduler shows vLLM's scheduler other queues during one call, "
        "and excludes requests from a step by the number of the step in which they may "
        "decode",
        where=("core.scheduler.prefill_first:PrefillFirstScheduler",),
        why="vLLM's scheduler has one order of running and waiting requests",
        upstream={
            "v1/core/sched/scheduler.py": (
                "next_decode_eligible_step",
                "self.kv_holding_waiting",
                "_get_local_prefix_cache_hit",
                "_handle_blocked_waiting_request",
                "_holds_kv_blocks",
                "self.deferred_waiting",
            ),
            "v1/core/kv_cache_manager.py": ("get_num_blocks_to_allocate", "watermark_blocks"),
        },
        goes_when="the order can be chosen",
    ),
    Override(
        what="a Ctrl-C that vLLM swallows while its engine starts is repeated",
        where=("core.process.shutdown:interrupt",),
        why="the client then waits for an engine that the same Ctrl-C has ended",
        upstream={
            "utils/network_utils.py": ("zmq_socket_ctx", "KeyboardInterrupt"),
            "v1/engine/utils.py": ("wait_for_engine_startup",),
            "v1/engine/core_client.py": ("VLLM_ENGINE_READY_TIMEOUT_S",),
        },
        goes_when="zmq_socket_ctx lets the interrupt through",
    ),
    Override(
        what="a server whose engine died exits with status 1; if it was told to end, the engine's"
        " end is not logged as an error",
        where=("core.process.shutdown:EngineDeath",),
        why="vLLM exits with status 0, and has no callback for either event",
        upstream={
            "entrypoints/launchers/launcher.py": ("shutdown triggered",),
            "v1/engine/core_client.py": ("engine core exited unexpectedly",),
            "v1/engine/async_llm.py": ("output_handler failed",),
            "v1/engine/exceptions.py": ("EngineDeadError",),
        },
        goes_when="the server's exit status shows that its engine died",
    ),
    Override(
        what="signals end open requests and, within a limit, the server; vLLM's SIGTERM handler "
        "shows which server starts",
        where=(
            "core.process.shutdown:SignalledEnd",
            "core.process.shutdown:take_over_signals",
            "core.process.middleware:EndedRequests",
        ),
        why="vLLM ends the engine and the task that passes tokens on, then waits without a "
        "timeout for connections of requests that wait for tokens",
        upstream={
            "entrypoints/launchers/launcher.py": ("return server.shutdown()", "shutdown_timeout"),
            "entrypoints/launchers/api_server/entry.py": ("_interrupt_init", "signal.SIGTERM"),
            "entrypoints/cli/serve.py": ("def signal_handler", "raise SystemExit"),
            "v1/utils.py": ("ApiServer_",),
        },
        goes_when="the server answers its open requests when it is told to end",
    ),
    Override(
        what="an engine that fails to start because of a setting reports it in one line and ends",
        where=("core.process.plain_errors:shorten_errors_of_engines",),
        why="vLLM logs the error with its traceback, and Python prints it again",
        upstream={
            "v1/engine/core.py": ("EngineCore failed to start.", "raise e"),
            "v1/engine/utils.py": ("Engine core initialization failed.",),
            "v1/executor/multiproc_executor.py": (
                "WorkerProc hit an exception.",
                "Worker failed with error",
                "WorkerProc initialization failed",
            ),
            "engine/arg_utils.py": ("def create_engine_config",),
        },
        goes_when="vLLM reports configuration errors separately",
    ),
    Override(
        what="an engine that ends normally ignores SIGTERM, and its heap is not collected again",
        where=(
            "core.process.engine_exit:finish_teardown",
            "core.process.engine_exit:leave_at_exit",
        ),
        why="vLLM restores SIGTERM's default before the teardown, and then sends it to the engine",
        upstream={
            "v1/engine/core.py": ("signal.SIG_DFL", "gc.freeze()"),
            "v1/engine/utils.py": ('"EngineCore"',),
            "v1/executor/multiproc_executor.py": ("VllmWorker-",),
        },
        goes_when="vLLM ignores it there, and freezes the heap on every platform",
    ),
    Override(
        what="workers ignore SIGINT; the file of the socket for an engine's start is removed",
        where=(
            "core.process.engine_exit:leave_interrupts_to_engine",
            "core.process.liveness:SocketFiles",
        ),
        why="a worker that Ctrl-C ends fails its engine's step, and libzmq leaves the files of "
        "sockets that it closes",
        upstream={
            "v1/executor/multiproc_executor.py": ("signal.signal(signal.SIGINT, signal_handler)",),
            "v1/engine/utils.py": ("local_handshake_address, zmq.ROUTER, bind=True",),
            "utils/network_utils.py": ("ctx.destroy(linger=linger)",),
        },
        goes_when="vLLM's engine ends its workers, and its sockets leave no files",
    ),
    Override(
        what="warnings about choices of the platform are filtered from the log",
        where=("core.log:leave_out_what_means_nothing",),
        why="every process logs them, and users cannot change the choices",
        upstream={
            "config/vllm.py": ("Inductor compilation was disabled by user settings",),
            "config/scheduler.py": ("Using custom scheduler class %s",),
            "models/kimi_k3/amd/latent_moe_runner.py": ("K3 latent-MoE tail is not shardable",),
        },
        goes_when="vLLM asks the platform before it warns",
    ),
)
