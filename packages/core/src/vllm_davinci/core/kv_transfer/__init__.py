"""KV cache blocks sent from a prefill engine to a decode engine, over NIXL or Mooncake."""
