"""Names of vLLM's load formats that a loader of ours takes over."""

# Of safetensors files by their names; the others hand tensors over in their own ways.
REPLACED = ("auto", "hf", "safetensors")
PREFIX = "davinci_"
