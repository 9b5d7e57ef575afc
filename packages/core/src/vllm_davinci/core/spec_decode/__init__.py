"""Speculative decoding: drafters, verification of drafts, and the resulting lengths."""
