"""`python -m ktmoe`, which is `ktmoe`."""

import sys

from ktmoe.cli import main

sys.exit(main())
