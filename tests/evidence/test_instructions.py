"""The tables of methods on instructions say what the results say."""

import pytest
from evidence.instructions import PAGE, TABLES, TASKS, Table


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_table_is_what_the_script_writes(table: Table) -> None:
    assert table.text(table.found()) in PAGE.read_text()


def test_of_the_lower_half_and_the_difference_to_training_alone() -> None:
    clients = {"clients": [0, 1, 2], "loss": [1.0, 2.0, None]}
    alone = {"clients": [0, 1, 2], "loss": [1.5, 2.5, 2.0]}
    written = {"rouge1": [0.2, 0.4, 0.9], "own_metric": [0.0, 1.0, None]}
    results = {
        "fedsdg": {0: {"personal": clients, "written": written}},
        "local": {
            0: {"personal": alone, "written": written},
            1: {"personal": alone, "written": written},
        },
    }
    first, second = TASKS.text(results).splitlines()[3:5]
    assert [cell.strip() for cell in first.split("|")[1:4]] == ["fedsdg", "1", "4.48"]
    assert first.split("|")[4].split()[0] == "-0.500"
    assert [cell.strip() for cell in second.split("|")[5:8]] == ["50.0", "30.0", "50.0"]
