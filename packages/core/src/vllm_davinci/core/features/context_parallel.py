"""Context parallelism: ranks divide a request's KV cache, or the tokens of its prefill."""

from vllm_davinci.core.config.side_streams import ATTENTION, EXPERTS, PREFETCH
from vllm_davinci.core.features.feature import Engine, Feature, refused

FLAG = "--decode-context-parallel-size"
MOST_RANKS = 16  # CANN's AttentionUpdate merges the partial results of up to 16 ranks


PREFILL = "--prefill-context-parallel-size"


def _ranks_of_prefills(engine: Engine) -> int:
    return engine.parallel.prefill_context_parallel_size


def _size(engine: Engine) -> int:
    return engine.parallel.decode_context_parallel_size


FEATURES = (
    Feature(
        FLAG,
        "context parallelism of decodes",
        lambda e: _size(e) > 1,
        excludes=dict.fromkeys(
            (
                "dbo.enabled",
                "--speculative-config",
                "--kv-transfer-config",
                "--kv-offloading-size",
                "an encoder and a decoder",
                "bidirectional attention in prompts",
                "recurrent states",
                "sparse attention",
            ),
            "",
        ),
    ),
    Feature(
        PREFILL,
        "context parallelism of prefills",
        lambda e: _ranks_of_prefills(e) > 1,
        excludes=dict.fromkeys(
            (
                FLAG,
                "dbo.enabled",
                "--data-parallel-size",
                "--pipeline-parallel-size",
                ATTENTION,
                EXPERTS,
                PREFETCH,
                "--enable-lora",
                "--speculative-config",
                "--kv-transfer-config",
                "--kv-offloading-size",
                "a model of images, videos or sound",
                "an encoder and a decoder",
                "recurrent states",
                "sparse attention",
            ),
            "",
        ),
    ),
    refused(
        f"{PREFILL} without latent attention",
        "prefills divided among ranks",
        lambda e: _ranks_of_prefills(e) > 1 and not getattr(e.model, "use_mla", False),
        because="vLLM divides prefills only with latent attention (DeepSeek)",
        as_given=lambda e: f"{PREFILL} {_ranks_of_prefills(e)}",
        instead="Use --tensor-parallel-size.",
    ),
    refused(
        f"{PREFILL} with --enable-expert-parallel",
        "whole experts with divided prefills",
        lambda e: _ranks_of_prefills(e) > 1 and e.parallel.enable_expert_parallel,
        instead="Remove --enable-expert-parallel: each expert is divided among all ranks.",
    ),
    refused(
        f"{FLAG} above {MOST_RANKS}",
        "a context divided among more ranks",
        lambda e: _size(e) > MOST_RANKS,
        as_given=lambda e: f"{FLAG} {_size(e)}",
        instead=f"Use at most {MOST_RANKS}.",
    ),
    refused(
        "--dcp-q-replicate",
        "queries of all heads on every rank",
        lambda e: _size(e) > 1 and bool(e.parallel.dcp_q_replicate),
    ),
)
