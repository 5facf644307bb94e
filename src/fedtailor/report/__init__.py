"""Comparisons of runs, as a table and as a page.

The report reads run directories and nothing else. `read` turns their files into records; `select`
selects, for every method and seed, the round with the best validation results; `metrics`
summarises the test results of that round over clients. `verdict` says what it comes to; `table` and
`page` show it.
"""

from .comparison import compare
from .figures import save_figures
from .page import write

__all__ = ["compare", "save_figures", "write"]
