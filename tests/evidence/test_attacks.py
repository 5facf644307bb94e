"""The page on attacks says what the results say."""

import pytest
from evidence.attacks import PAGE, TABLE, page, table


@pytest.mark.slow
def test_the_page_and_the_table_are_what_the_script_writes() -> None:
    assert PAGE.read_text() == page()
    assert TABLE.read_text() == table()
