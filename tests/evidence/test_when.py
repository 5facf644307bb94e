"""The page on which method to use says what the results say."""

from evidence.when import (
    MEASURED,
    PAGE,
    WITH_FIRST_CHOICE,
    advice,
    measured,
    page,
    with_first_choice,
)


def test_the_page_and_the_advice_are_what_the_script_writes() -> None:
    found = measured()
    assert MEASURED.read_text() == advice(found)
    assert PAGE.read_text() == page(found)
    for path, folder in WITH_FIRST_CHOICE.items():
        assert path.read_text() == with_first_choice(path.read_text(), found, folder)
