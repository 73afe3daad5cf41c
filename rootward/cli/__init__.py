"""The `rootward` command, one module a subcommand."""
