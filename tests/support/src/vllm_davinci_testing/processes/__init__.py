"""Processes started by tests: programs, forks, ranks. Waits with a limit."""
