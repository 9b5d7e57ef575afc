"""Model definitions that gain from their own code."""
