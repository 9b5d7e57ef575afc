"""Features of vLLM that need no code in this plugin, supported or refused."""

from vllm_davinci.core.config.registered_names import REPLACED, WITHOUT_FILES, is_served
from vllm_davinci.core.features.feature import Engine, Feature, model_has, refused


def _foreign_profilers(engine: Engine) -> list[str]:
    """Profiler settings that ask for another vendor's devices."""
    asked = engine.vllm.profiler_config
    activities = asked.torch_profiler_activities or ()
    return [
        *(f"the profiler {name}" for name in (asked.profiler,) if name not in (None, "torch")),
        *(f"the activity {name}" for name in activities if name not in ("CPU", "PrivateUse1")),
    ]


def _dtype(engine: Engine) -> str | None:
    return None if engine.model is None else str(engine.model.dtype).removeprefix("torch.")


def _takes_more_than_text(engine: Engine) -> bool:
    asked = getattr(engine.model, "multimodal_config", None)
    is_text = getattr(asked, "language_model_only", False)
    return model_has("is_multimodal_model")(engine) and not is_text


FEATURES = (
    Feature(
        "--data-parallel-size", "data parallelism", lambda e: e.parallel.data_parallel_size > 1
    ),
    Feature(
        "--pipeline-parallel-size",
        "pipeline stages",
        lambda e: e.parallel.pipeline_parallel_size > 1,
    ),
    Feature("", "a model of images, videos or sound", model_has("is_multimodal_model")),
    Feature("", "images, videos or sound", _takes_more_than_text),
    Feature(
        "",
        "an encoder and a decoder",
        model_has("is_encoder_decoder"),
        settle=lambda e: e.set(
            e.vllm.cache_config,
            "enable_prefix_caching",
            False,
            "vLLM finds no prefixes of encoder inputs",
        ),
    ),
    Feature(
        "--runner pooling",
        "pooling models",
        lambda e: getattr(e.model, "runner_type", None) == "pooling",
    ),
    Feature("--enable-prompt-embeds", "prompts of embeddings", model_has("enable_prompt_embeds")),
    Feature("--logits-processors", "logits processors of the user", model_has("logits_processors")),
    Feature(
        "--enable-trace-replay", "decoding along a given trace", model_has("enable_trace_replay")
    ),
    Feature(
        "--return-sampling-mask",
        "the tokens that sampling could choose, in answers",
        model_has("return_sampling_mask"),
    ),
    Feature(
        "--enable-batch-sharded-sampling",
        "sampling that is sharded over ranks",
        lambda e: e.parallel.enable_batch_sharded_sampling,
    ),
    Feature(
        "enable_weight_nz_layout",
        "quantized weights in the NZ layout",
        lambda e: e.config.enable_weight_nz_layout,
    ),
    refused(
        "--cpu-offload-gb",
        "weights in host memory",
        lambda e: e.vllm.offload_config.uva.cpu_offload_gb > 0,
    ),
    refused(
        "--offload-group-size",
        "weights in host memory",
        lambda e: e.vllm.offload_config.prefetch.offload_group_size > 0,
    ),
    refused(
        "--enable-return-routed-experts",
        "the experts of each token, in answers",
        lambda e: e.vllm.aux_output_config.enabled,
    ),
    refused(
        "--enable-fault-tolerance",
        "recovery from a fault",
        lambda e: e.parallel.enable_fault_tolerance,
        because="HCCL's collectives cannot continue without the failed rank; one rank's error "
        "ends the engine",
    ),
    refused(
        "--monokernel",
        "kernels of a whole layer",
        lambda e: e.vllm.kernel_config.monokernel,
        because="they are AMD's",
    ),
    refused(
        "--load-format",
        "weights without conversion or check",
        lambda e: not is_served(str(e.vllm.load_config.load_format)),
        as_given=lambda e: f"--load-format {e.vllm.load_config.load_format}",
        instead=f"Use one of {', '.join((*REPLACED, WITHOUT_FILES))}.",
    ),
    refused(
        "--kv-cache-dtype",
        "a KV cache of another dtype than the model's",
        lambda e: e.vllm.cache_config.cache_dtype not in ("auto", _dtype(e)),
        as_given=lambda e: f"--kv-cache-dtype {e.vllm.cache_config.cache_dtype}",
        because=lambda e: f"the model is {_dtype(e)}",
        instead="Use --kv-cache-dtype auto.",
    ),
    refused(
        "--profiler-config",
        "another vendor's profiler",
        lambda e: bool(_foreign_profilers(e)),
        because=lambda e: f"it asks for {' and '.join(_foreign_profilers(e))}",
        instead='Use the profiler "torch", with the activities CPU and PrivateUse1.',
    ),
    refused(
        "lmhead_tp_size",
        "an LM head divided differently from other layers",
        lambda e: e.config.lmhead_tp_size not in (-1, e.parallel.tensor_parallel_size),
        as_given=lambda e: f"additional_config key 'lmhead_tp_size' = {e.config.lmhead_tp_size}",
        instead="Use -1, or the size of --tensor-parallel-size.",
    ),
)
