"""vLLM engines and servers for tests, their models and references."""
