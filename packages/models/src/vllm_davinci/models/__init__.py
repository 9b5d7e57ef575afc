"""Model definitions that are faster with code of their own."""
