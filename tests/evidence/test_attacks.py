"""The page on attacks says what the results say."""

from evidence.attacks import PAGE, page


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text() == page()
