"""Files with durations of engines' steps: those that this package brings, and those made here."""
