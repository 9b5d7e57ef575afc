"""Support shared by tests of several packages. README.md lists its parts."""
