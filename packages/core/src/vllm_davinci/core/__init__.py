"""Everything vLLM asks of a platform, answered for the Ascend NPU."""
