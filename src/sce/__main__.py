"""`python -m sce`: the command, where it is not on the path."""

import sys

from sce.cli import main

sys.exit(main())
