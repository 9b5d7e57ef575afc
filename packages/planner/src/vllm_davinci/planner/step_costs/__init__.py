"""Step-time tables of engines: shipped, or made at start and cached."""
