"""The page on which method to use says what the results say."""

import json

from evidence.when import MEASURED, PAGE, measured, page


def test_the_page_and_the_advice_are_what_the_script_writes() -> None:
    found = measured()
    assert json.loads(MEASURED.read_text()) == found
    assert PAGE.read_text() == page(found)
