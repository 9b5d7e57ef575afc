"""Layers of vLLM models, with steps for them and what they must compute."""
