"""Support that tests of several packages share. README.md says what lies where."""
