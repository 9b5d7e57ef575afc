"""One module per part: `cases(settings, directory)` yields what it runs."""
