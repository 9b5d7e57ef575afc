"""vLLM engines and servers that tests start, models for them, and what they are compared with."""
