"""Which of vLLM's model runners serves, and what V2 does not do here yet."""

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from vllm_davinci.core.config.hybrids import keeps_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WHY_V1 = f"{MODEL_RUNNER}=1 chooses V2, which does not do all of it yet"
TRUE = ("1", "true")


def choose_model_runner(environment: MutableMapping[str, str]) -> bool:
    """Chooses vLLM's V1 model runner where nobody has chosen; whether vLLM would have taken V2.

    vLLM's own choice depends on whether it takes Triton for usable: it does on a host with
    triton-ascend, and also where CUDA_VISIBLE_DEVICES is empty. To be called before vLLM's
    configuration asks; processes that this one starts inherit the choice.
    """
    if MODEL_RUNNER in environment:
        return False
    from vllm.triton_utils import HAS_TRITON  # asks the platform, which imports this module

    environment[MODEL_RUNNER] = "0"
    return bool(HAS_TRITON)


def is_v2_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the V2 runner was asked for by its variable."""
    return environment.get(MODEL_RUNNER, "").strip().lower() in TRUE


def refused_on_v2(vllm_config: "VllmConfig", environment: Mapping[str, str]) -> dict[str, bool]:
    """Features that the V2 runner lacks, and whether each was asked for."""
    if not vllm_config.use_v2_model_runner:
        return {}
    if not is_v2_chosen(environment):  # some options of vLLM choose it by themselves
        return {"watermarks and HiSparse, which take the V2 runner": True}
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    drafts = vllm_config.speculative_config
    asked = {
        "MTP of several modules (--speculative-config)": (
            drafts is not None and drafts.use_multi_module_mtp()
        ),
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--enable-lora": vllm_config.lora_config is not None,
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--enable-batch-sharded-sampling": parallel.enable_batch_sharded_sampling,
    }
    if model is not None:
        asked |= {
            "models with images or sound": model.is_multimodal_model,
            "encoder-decoder models": model.is_encoder_decoder,
            "models with recurrent states": keeps_states(model),
            "--runner pooling": model.runner_type == "pooling",
            "--logits-processors": bool(model.logits_processors),
            "--enable-trace-replay": model.enable_trace_replay,
        }
    return {f"{what} with {MODEL_RUNNER}=1": each for what, each in asked.items()}
