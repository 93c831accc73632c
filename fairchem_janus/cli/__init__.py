"""The `fairchem-janus` command line: one file per sub-command, each with a `register(app)` function."""
