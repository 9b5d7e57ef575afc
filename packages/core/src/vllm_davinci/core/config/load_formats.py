"""Names of vLLM's load formats: those that a loader of ours takes over, and those that are left."""

# vLLM reads these tensor by tensor into the host's memory, where they are converted and counted.
REPLACED = ("auto", "hf", "safetensors", "mistral", "npcache", "pt")
PREFIX = "davinci_"
# Weights that are made without files, so that nothing can be missing.
WITHOUT_FILES = "dummy"


def is_served(load_format: str) -> bool:
    """Whether checkpoints of that format are converted and checked; others are refused."""
    return load_format == WITHOUT_FILES or load_format.removeprefix(PREFIX) in REPLACED
