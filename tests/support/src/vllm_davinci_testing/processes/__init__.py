"""Processes started by tests: programs, forks, ranks; waits with a limit."""
