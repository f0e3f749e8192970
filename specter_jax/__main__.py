"""`python -m specter_jax` is the `specter` command."""

import sys

from specter_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
