from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from transformers import PreTrainedTokenizerBase

import fedtailor as ft
from fedtailor.data import DataConfig, Dataset, load_data
from fedtailor.data.names import check_names, client_number, listed
from fedtailor.data.survey import survey
from fedtailor.errors import InputError, unknown


def test_text_is_a_name_or_else_a_number():
    names = ("berlin", "lagos", "oslo")
    assert [client_number(client, 3, names) for client in ("lagos", "2", 2)] == [1, 2, 2]
    assert client_number("2", 3, None) == 2


def test_where_names_are_numbers_text_is_only_a_name():
    names = ("3", "7", "clinic")
    assert [client_number(client, 3, names) for client in ("7", 1, "clinic")] == [1, 1, 2]
    with pytest.raises(InputError, match="no client '1'; allowed: 3, 7, clinic"):
        client_number("1", 3, names)


@pytest.mark.parametrize(
    ("client", "names", "message"),
    [
        ("belin", ("berlin", "lagos"), "no client 'belin'; did you mean 'berlin'? allowed: berlin"),
        ("2", ("berlin", "lagos"), "no client 2; allowed: 0 to 1"),
        (-1, ("berlin", "lagos"), "no client -1; allowed: 0 to 1"),
        (0.5, ("berlin", "lagos"), "no client 0.5; allowed: 0 to 1"),
        (True, None, "no client True; allowed: 0 to 1"),
        ("-1", None, "no client -1; allowed: 0 to 1"),
        (5000 * "9", None, "no client '9999"),
        ("x", tuple(f"c{n}" for n in range(30)), "no client 'x'; 30 clients have names: c0, c1"),
        ("", ("", "ward"), "no client ''; allowed: ward"),
    ],
)
def test_unknown_clients(client, names, message):
    with pytest.raises(InputError) as caught:
        client_number(client, 2, names)
    assert str(caught.value).startswith(message)


def test_clients_that_joined_are_listed_by_name():
    for client, names, message in [
        ("istambul", ("rome",), "did you mean 'istanbul'? allowed: rome, istanbul"),
        ("istambul", None, "no client istambul; allowed: 0 to 0, or by name: istanbul"),
        (1, ("rome",), "no client 1; allowed: 0 to 0, or by name: istanbul"),
    ]:
        with pytest.raises(InputError) as caught:
            client_number(client, 1, names, ["istanbul"])
        assert str(caught.value).endswith(message)


def test_long_lists_end_with_their_length():
    assert listed([f"c{n}" for n in range(21)]).endswith("c19, and 1 more")


@pytest.mark.parametrize("wild", ["a\x1b[2Jb", "a\0b", "a\nb", "\x9bb", "\ud800", "a\u202eb"])
def test_names_that_cant_be_shown_are_refused(wild: str, digits: Dataset) -> None:
    allowed = "can't be shown; allowed are letters, digits, punctuation, symbols and spaces"
    for kind, names in (("class", {"classes": [*"012345678", wild]}),
                        ("client", {"client_names": ("oslo", wild)})):  # fmt: skip
        with pytest.raises(InputError) as caught:
            replace(digits, **names)
        assert str(caught.value).startswith(f"{kind} {wild!a}: ")
        assert str(caught.value).endswith(allowed)
        assert str(caught.value).isprintable()


def test_a_wild_name_is_told_with_its_column(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "t.csv"
    config = DataConfig(path=str(path), client="ward")
    place = f"in column '{{}}' of {path}: '\\x1b' can't be shown"
    rows = [("x", "well", "a"), ("y", "ill", "b"), ("z", "ill", "b"), ("u", "well", "a")]
    for kind, column, number in (("class", "label", 1), ("client", "ward", 2)):
        wild = [tuple(f"{c}\x1b[2J" if at == number else c for at, c in enumerate(r)) for r in rows]
        path.write_text("\n".join(map(",".join, [("text", "label", "ward"), *wild])))
        for read in (
            lambda: load_data(config, tokenizer),
            lambda: survey(str(path)).roles("text", "label", "ward"),
        ):
            with pytest.raises(InputError, match=rf"^{kind} '.*\\x1b\[2J' ") as caught:
                read()
            assert place.format(column) in str(caught.value)
    frame = pd.DataFrame(wild, columns=["text", "label", "ward"])
    data = ft.Data.from_pandas(frame, client="ward")
    with pytest.raises(InputError, match=r"^client 'a\\x1b\[2J' in column 'ward': "):
        data.load(data.config(DataConfig()), tokenizer)
    path.write_text("text,label\x1b[2J\nx,y\n")
    with pytest.raises(InputError, match=r"^column 'label\\x1b\[2J' in .*t\.csv: "):
        survey(str(path))


def test_a_name_has_a_longest_length(digits: Dataset) -> None:
    replace(digits, classes=[*"012345678", "x" * 500])
    with pytest.raises(InputError, match="has a name of 501 characters; at most 500 are allowed"):
        replace(digits, classes=[*"012345678", "x" * 501])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Zürich", "Zu\u0308rich"),
        ("ward 7", "ward\u00a07"),
        ("ward 7", "ward 7 "),
        ("می\u200cخواهم", "میخواهم"),
        ("❤", "❤\ufe0f"),
    ],
)
def test_two_spellings_that_print_alike_are_refused_with_their_difference(
    one: str, other: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_names("client", ["Bern", one, other])
    assert str(caught.value).startswith(f"client {other!a} prints like {one!a}; write")
    with pytest.raises(InputError) as caught:
        client_number(other, 2, ["Bern", one])
    assert f"no client {other!a} (which prints like {one!a}); allowed: Bern" in str(caught.value)
    assert f"unknown label {other!a} (which prints" in str(unknown("label", other, [one, "x"]))
    check_names("client", ["Bern", one, one])
