"""Comparisons of runs, as a table and as a page. Reads run directories and nothing else."""

from .page import write
from .table import compare

__all__ = ["compare", "write"]
