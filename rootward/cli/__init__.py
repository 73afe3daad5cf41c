"""The `rootward` command, one module for a subcommand or for several that belong together."""
