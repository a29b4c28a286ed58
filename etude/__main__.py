"""Entry point of `python -m etude`, which is the same as `etude`."""

import sys

from etude.cli import main

sys.exit(main())
