"""Data sets and how they are divided among clients."""

from .config import DataConfig, SplitConfig
from .partition import partition
from .sources import BUILTIN, load
from .table import Dataset, Partition

__all__ = ["BUILTIN", "DataConfig", "Dataset", "Partition", "SplitConfig", "load", "partition"]
