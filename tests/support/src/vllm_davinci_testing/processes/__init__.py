"""Processes that tests start: programs, forks, ranks; and waits with a limit."""
