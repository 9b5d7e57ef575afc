"""Layers of vLLM models, with steps and expected results."""
