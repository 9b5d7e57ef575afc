"""Speculative decoding: what drafts, how drafts are verified, and what their lengths come to."""
