"""KV cache blocks that go from an engine of prefills to one of decodes, over NIXL or Mooncake."""
