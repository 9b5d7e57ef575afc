"""One module per part: `cases(settings, directory)` yields its cases."""
