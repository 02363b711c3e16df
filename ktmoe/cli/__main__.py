"""`python -m ktmoe.cli`."""

import sys

from ktmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
