"""Context parallelism of decodes: a request's KV cache is divided among ranks."""

from vllm_davinci.core.features.feature import Engine, Feature, refused

FLAG = "--decode-context-parallel-size"
MOST_RANKS = 16  # whose partial results CANN's AttentionUpdate merges


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
                "bidirectional attention to images",
                "recurrent states",
                "sparse attention",
            ),
            "",
        ),
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
