"""Names under which vLLM finds parts of this plugin, and vLLM's names that they replace."""

# Load formats with which vLLM reads tensors one by one into host memory, where our loader converts
# and counts them. Our formats have these names with the prefix.
REPLACED = ("auto", "hf", "safetensors", "mistral", "npcache", "pt")
PREFIX = "davinci_"
# Formats that create weights without files, so no tensor can be missing.
WITHOUT_FILES = "dummy"
# Sleep mode backends.
VLLMS_SLEEP_BACKEND, SLEEP_BACKEND = "cumem", "davinci"
# Weight transfer engines.
HCCL_ENGINE, IPC_ENGINE = "hccl", "npu_ipc"


def is_served(load_format: str) -> bool:
    """True if checkpoints of that format are converted and checked; others are refused."""
    return load_format == WITHOUT_FILES or load_format.removeprefix(PREFIX) in REPLACED
