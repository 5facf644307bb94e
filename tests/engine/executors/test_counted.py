from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.methods import METHODS
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation


def test_each_result_of_a_round_is_counted() -> None:
    method, federation = METHODS["local"](), digits_federation()
    told: list[tuple[str, int]] = []
    plan = Plan(1, LocalConfig(steps=1), engine=EngineConfig(executor="vectorised"))
    task = Task(digits_backbone(), method.adapt)
    (done,) = rounds(
        method, task, federation, plan, on_result=lambda work, count: told.append((work, count))
    )
    assert told == [(work, n) for work in ("train", "evaluate") for n in range(1, 6)]
    assert done.executor == "vectorised"
