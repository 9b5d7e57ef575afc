"""KV cache blocks offloaded to host memory, behind vLLM's offloading connector."""
