"""Data sets and how they are divided among clients.

`load_data` reads a *source* (a built-in data set, a file, the Hugging Face hub) into a `Dataset`.
`Data` is a source that Python code names.
`partition` assigns its rows to clients and splits each client's rows into training, validation and
test. A `Federation` draws cohorts and batches from both.

One word, one meaning:

- A *split* is a list of rows a client: training, validation or test.
- *Shares* are rows assigned to clients; splits are made of them.
- A *chunk* is a number of rows that are processed together to bound memory.
- A *block* is a transformer block of the model, as in `Backbone.blocks`; data have none.
- Long texts are *truncated*, and rows are *held out*; nothing is cut.
"""

from .config import DataConfig, SplitConfig
from .from_python import Data
from .partition import partition
from .sources import BUILTIN, load_data
from .table import Dataset, Partition

__all__ = [
    "BUILTIN",
    "Data",
    "DataConfig",
    "Dataset",
    "Partition",
    "SplitConfig",
    "load_data",
    "partition",
]
