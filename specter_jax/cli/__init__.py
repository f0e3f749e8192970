"""The `specter` command: arguments are checked before JAX is loaded, errors are one line."""
