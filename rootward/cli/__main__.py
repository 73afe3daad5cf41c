"""`python -m rootward.cli`: the `rootward` command."""

import sys

from rootward.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
