"""Names under which vLLM finds parts of this plugin, and those of vLLM that they replace."""

# Load formats that vLLM reads tensor by tensor into the host's memory, where our loader converts
# and counts them. Ours has the same name with the prefix.
REPLACED = ("auto", "hf", "safetensors", "mistral", "npcache", "pt")
PREFIX = "davinci_"
# Weights that are made without files, so that no tensor can be missing.
WITHOUT_FILES = "dummy"
# Backends of sleep mode.
VLLMS_SLEEP_BACKEND, SLEEP_BACKEND = "cumem", "davinci"
# Engines of weight transfer.
HCCL_ENGINE, IPC_ENGINE = "hccl", "npu_ipc"


def is_served(load_format: str) -> bool:
    """Whether checkpoints of that format are converted and checked; others are refused."""
    return load_format == WITHOUT_FILES or load_format.removeprefix(PREFIX) in REPLACED
