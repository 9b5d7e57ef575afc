"""Options of engines that capture few sizes of decode steps, so that steps are padded."""

from typing import Any


def decode_graphs(*sizes: int) -> dict[str, Any]:
    """Returns options of an engine that captures decode steps of these sizes."""
    return {
        "enforce_eager": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(sizes),
        },
    }


SIZES = [2, 3, 8]
CAPTURED: dict[str, Any] = {
    "worker_extension_cls": "vllm_davinci_testing.engines.graph_worker.GraphWorker",
    **decode_graphs(*SIZES),
}
