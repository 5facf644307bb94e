"""The page on which method to use says what the results say."""

from evidence.when import MEASURED, PAGE, advice, measured, page


def test_the_page_and_the_advice_are_what_the_script_writes() -> None:
    found = measured()
    assert MEASURED.read_text() == advice(found)
    assert PAGE.read_text() == page(found)
