"""`python -m etude` is `etude`."""

import sys

from etude.cli import main

sys.exit(main())
