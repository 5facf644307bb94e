"""Checks that every method must pass, also one of your own.

`check_method` runs them all; ``fedtailor check-method FILE.py:CLASS`` prints each. `checks` has
them one by one, `subjects` the small models and clients on which they run.
"""

from .case import Case, CheckFailedError
from .check import check_method, outcomes
from .checks import CHECKS
from .subjects import Subject, pictures, texts

__all__ = [
    "CHECKS",
    "Case",
    "CheckFailedError",
    "Subject",
    "check_method",
    "outcomes",
    "pictures",
    "texts",
]
