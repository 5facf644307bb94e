from pathlib import Path

from fedtailor.errors import DivergedError, InputError, missing_file, unknown


def test_an_unknown_name_is_told_with_the_nearest_ones_its_place_and_what_is_allowed() -> None:
    error = unknown("key", "sise", ["size", "fraction"], where="cohort", kind="fields")
    assert isinstance(error, InputError)
    assert str(error) == "unknown key 'sise' in cohort; did you mean 'size'? fields: fraction, size"
    far = unknown("method", "xyz", ["fedavg", "ditto"])
    assert str(far) == "unknown method 'xyz'; allowed: ditto, fedavg"


def test_bad_input_and_divergence_are_value_errors() -> None:
    assert issubclass(DivergedError, InputError)
    assert issubclass(InputError, ValueError)


def test_a_missing_file_reminds_of_one_with_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "visits.csv").touch()
    (tmp_path / "wards").mkdir()
    said = str(missing_file(tmp_path / "visit.csv", " here"))
    assert said.endswith(f"visit.csv' here; did you mean {str(tmp_path / 'visits.csv')!r}?")
    assert "did you mean" not in str(missing_file(tmp_path / "wards"))
