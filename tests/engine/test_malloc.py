"""What is freed stays with the process: measured in one of its own, whose memory nobody else has
used."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from fedtailor.engine.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = min(faults() for _ in range(3))
keep_freed_memory()
for _ in range(16):  # the heap grows until its small gaps are used up
    faults()
print(before, min(faults() for _ in range(3)))
"""


@pytest.mark.slow
def test_freed_memory_is_not_fetched_from_the_system_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    pages = (40 << 20) // 4096
    assert after < pages / 10
    assert before >= pages
