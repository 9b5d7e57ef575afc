"""Model definitions that are faster than vLLM's, or that vLLM lacks on this platform."""
