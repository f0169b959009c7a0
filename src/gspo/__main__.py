"""`python -m gspo` is the command `gspo`."""

import sys

from gspo.cli import main

sys.exit(main())
