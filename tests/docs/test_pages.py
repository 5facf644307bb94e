"""The runner of pages: files, one shell, what is compared, and that nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages

PAGE = """
```python
# hello.py
print("hello", 3.14)
print("left out")
```

```bash
name=world
python -S hello.py
```

```text
hello 2.7
...
```

```bash
echo $name; {last}
```

```text
{shown}
```
"""


def differences(folder: Path, last: str, shown: str) -> list[str]:
    folder.mkdir()
    page = PAGE.format(last=last, shown=shown)
    printed = pages.run(page, folder, 60, patience=0.5)
    texts = [block for block in pages.blocks(page) if block.language == "text"]
    return [line for block in texts for line in pages.missing(block, printed[block.line])]


def test_a_page_is_run_in_one_shell_and_compared_without_its_numbers(tmp_path: Path) -> None:
    assert differences(tmp_path / "right", "true", "world") == []
    assert differences(tmp_path / "wrong", "true", "hello 3.14") == ["hello 3.14"]


def test_a_command_that_fails_fails_the_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="world"):
        differences(tmp_path / "page", "false", "world")


def test_a_page_that_leaves_a_process_behind_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="leaves processes"):
        differences(tmp_path / "page", "sleep 60 &", "world")


def test_a_block_of_another_kind_is_refused() -> None:
    with pytest.raises(AssertionError, match="line 1"):
        pages.script("```python\nprint(1)\n```\n")
