"""`python -m ktmoe.cli`."""

import sys

from ktmoe.cli import main

sys.exit(main())
