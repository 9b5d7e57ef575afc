"""Creates and runs engines under the same conditions for every comparison."""

from typing import Any


def engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Returns vLLM's arguments for one side of a comparison; options:
    offline_throughput.process_options
    """
    return {
        "model": options["model"],
        "dtype": "bfloat16",
        "max_model_len": options["max_model_len"],
        "max_num_seqs": options["requests"],
        "kv_cache_memory_bytes": options["kv_cache_bytes"],
        "enable_prefix_caching": False,
        "seed": options["seed"],
        **options["engine"],
    }


def prompts(options: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Makes a different prompt per request: they differ from the first token."""
    vocabulary = options["vocabulary"]
    return [
        {
            "prompt_token_ids": [
                (7 * position + 13 * request) % (vocabulary - 8) + 4
                for position in range(options["prompt_tokens"])
            ]
        }
        for request in range(options["requests"])
    ]
