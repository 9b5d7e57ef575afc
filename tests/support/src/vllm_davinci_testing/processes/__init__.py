"""Processes started by tests: programs, forks, ranks; and waits with a limit."""
