import numpy as np

from fedtailor.engine.joining import Candidate
from fedtailor.inference.choose import choose


def test_the_best_on_validation_examples_is_kept() -> None:
    def candidate(loss: float, hits: float, count: float = 4) -> Candidate:
        return Candidate({}, np.array([[loss, hits, count], [0.0, 9.0, 9.0]]))

    found = {"guess": candidate(2, 3), "fitted": candidate(1, 2), "global": candidate(3, 3)}
    assert choose(found, 4, fits=True, label="x") == (
        "guess",
        "the best of 3 on its 4 validation examples, too few to choose by with confidence; of "
        "equal accuracy, it has the lowest loss",
    )
    for count, few in ((29, ", too few to choose by with confidence"), (30, "")):
        more = {name: candidate(1, 3, count) for name in found}
        note = f"the best of 3 on its {count} validation examples{few}"
        more["fitted"] = candidate(1, 4, count)
        assert choose(more, count, fits=True, label="x") == ("fitted", note)
    assert choose({**found, "fitted": candidate(2, 3)}, 4, fits=True, label="x")[0] == "fitted"
    assert choose({**found, "fitted": candidate(np.nan, 3)}, 4, fits=True, label="x")[0] == "guess"
    assert choose(found, 4, fits=True, label="x", by_loss=True)[0] == "fitted"
    without = {"guess": candidate(0, 0, 0), "fitted": candidate(0, 0, 0)}
    unchecked = "there are no validation examples to check the fitted model"
    assert choose(without, 0, fits=True, label="x") == ("guess", unchecked)
    with_global = {**without, "global": Candidate({}, np.array([[0.0, 0, 0], [1, 8, 9]]))}
    assert choose(with_global, 0, fits=True, label="x", private=True) == ("global", unchecked)
    untrained = choose(without, 0, fits=True, label="x", private=True)
    assert untrained == ("fitted", f"{unchecked}, but x has no other one that is trained")
