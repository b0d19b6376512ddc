"""`python -m minfer` is the command line."""

import sys

from minfer.effects.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
