import pytest

from fedtailor.data.names import client_number, listed
from fedtailor.errors import InputError


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
        ("-1", None, "no client -1; allowed: 0 to 1"),
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
