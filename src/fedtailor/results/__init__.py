"""What a run has given, for Python code and notebooks.

`run` runs an experiment and returns a `Result`; `open_result` opens an old run.
"""

from .result import Best, Result, open_result, run

__all__ = ["Best", "Result", "open_result", "run"]
