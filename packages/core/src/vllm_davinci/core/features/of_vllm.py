"""vLLM's features that need no code of this plugin: who serves them."""

from vllm_davinci.core.config.hybrids import keeps_states
from vllm_davinci.core.features.feature import Engine, Feature, Runner


def _of_model(name: str, title: str, flag: str, field: str, runners: Runner) -> Feature:
    """A feature that a field of vLLM's ModelConfig asks for."""
    return Feature(name, title, flag, lambda e: bool(getattr(e.model, field, False)), runners)


def _is_pooling(engine: Engine) -> bool:
    return engine.model is not None and engine.model.runner_type == "pooling"


# `runners` says which of vLLM's model runners serves the feature: Runner.V1, V2 or BOTH.
FEATURES = (
    Feature(
        name="data_parallel",
        title="data parallelism",
        flag="--data-parallel-size",
        is_asked=lambda e: e.vllm.parallel_config.data_parallel_size > 1,
        runners=Runner.V1,
    ),
    Feature(
        name="pipeline_parallel",
        title="pipeline stages",
        flag="--pipeline-parallel-size",
        is_asked=lambda e: e.vllm.parallel_config.pipeline_parallel_size > 1,
        runners=Runner.V1,
    ),
    Feature(
        name="prefill_context_parallel",
        title="context parallelism of prefills",
        flag="--prefill-context-parallel-size",
        is_asked=lambda e: e.vllm.parallel_config.prefill_context_parallel_size > 1,
        runners=Runner.V1,
    ),
    Feature(
        name="context_parallel",
        title="context parallelism of decodes",
        flag="--decode-context-parallel-size",
        is_asked=lambda e: e.vllm.parallel_config.decode_context_parallel_size > 1,
        runners=Runner.V1,
    ),
    Feature(
        name="expert_balance",
        title="expert balancing",
        flag="--enable-eplb",
        is_asked=lambda e: e.vllm.parallel_config.enable_eplb,
        runners=Runner.V1,
    ),
    Feature(
        name="dual_batch",
        title="dual-batch overlap",
        flag="dbo.enabled",
        is_asked=lambda e: e.config.dbo.enabled,
        runners=Runner.V1,
    ),
    Feature(
        name="speculation",
        title="speculative decoding",
        flag="--speculative-config",
        is_asked=lambda e: e.vllm.speculative_config is not None,
        runners=Runner.V1,
    ),
    Feature(
        name="lora",
        title="LoRA adapters",
        flag="--enable-lora",
        is_asked=lambda e: e.vllm.lora_config is not None,
        runners=Runner.V1,
    ),
    Feature(
        name="kv_transfer",
        title="a KV connector",
        flag="--kv-transfer-config",
        is_asked=lambda e: e.vllm.kv_transfer_config is not None,
        runners=Runner.V1,
    ),
    Feature(
        name="batch_sharded_sampling",
        title="sampling that is sharded over ranks",
        flag="--enable-batch-sharded-sampling",
        is_asked=lambda e: e.vllm.parallel_config.enable_batch_sharded_sampling,
        runners=Runner.V1,
    ),
    _of_model("multimodal", "images, videos and sound", "", "is_multimodal_model", Runner.V1),
    _of_model("encoder_decoder", "an encoder and a decoder", "", "is_encoder_decoder", Runner.V1),
    Feature(
        name="recurrent_states",
        title="recurrent states",
        flag="",
        is_asked=lambda e: keeps_states(e.model),
        runners=Runner.V1,
    ),
    Feature("pooling", "pooling models", "--runner pooling", _is_pooling, Runner.V1),
    _of_model(
        "prompt_embeds",
        "prompts of embeddings",
        "--enable-prompt-embeds",
        "enable_prompt_embeds",
        Runner.V1,
    ),
    _of_model(
        "logits_processors",
        "logits processors of the user",
        "--logits-processors",
        "logits_processors",
        Runner.V1,
    ),
    _of_model(
        "trace_replay",
        "decoding along a given trace",
        "--enable-trace-replay",
        "enable_trace_replay",
        Runner.V1,
    ),
    _of_model(
        "sampling_mask",
        "the mask of sampling in answers",
        "--return-sampling-mask",
        "return_sampling_mask",
        Runner.V1,
    ),
)
