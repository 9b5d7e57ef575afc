"""KV cache blocks that go on in the host's memory, behind vLLM's offloading connector."""
