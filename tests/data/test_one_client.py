"""One client's rows among those of several."""

from __future__ import annotations

import numpy as np
import pytest

from fedtailor.data.columns import Columns
from fedtailor.data.one_client import columns_of_client
from fedtailor.errors import InputError

TEXTS = ["a", "b", "c", "d", "e"]
CLIENTS = ["oslo", "haifa", None, "haifa", "oslo"]


def columns(clients: list[str | None] | None) -> Columns:
    return Columns(lambda rows: [TEXTS[row] for row in rows], 3, 2, [0, 1, 2, 3, 4], (), clients)


def test_columns_keep_the_clients_rows_alone() -> None:
    own, omissions = columns_of_client(columns(CLIENTS), "haifa", "new.csv")
    assert own.read(np.arange(2)) == ["b", "d"]
    assert (own.num_train, own.num_test, own.labels, own.clients) == (1, 1, [1, 3], None)
    assert [one.text for one in omissions] == ["3 rows of other clients, left out"]
    assert columns_of_client(columns(None), "haifa", "new.csv")[0].num_train == 3


def test_rows_of_other_clients_alone_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        columns_of_client(columns(CLIENTS), "rome", "new.csv")
    assert str(caught.value) == (
        "new.csv has no rows of client 'rome', but of haifa (2), oslo (2); name one of these with "
        "--client, or leave out the column of clients"
    )
    tested = ["haifa", "haifa", "haifa", "oslo", "oslo"]
    with pytest.raises(InputError, match=r"no test rows of client 'haifa', but of oslo \(2\)"):
        columns_of_client(columns(tested), "haifa", "new.csv")
