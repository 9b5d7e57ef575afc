"""Files with durations of engines' steps, which starts make and find again."""
