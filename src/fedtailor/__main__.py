"""``python -m fedtailor``."""

import sys

from .cli import main

sys.exit(main())
