"""On a GPU: `make test-gpu`. The same numbers with kernels that are recorded and without, for
clients at once and one after the other, and up to rounding as on a CPU."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan, ScheduleConfig
from fedtailor.engine.executors.captured import Capture, cuda_graphs
from fedtailor.engine.executors.vectorised import AdaptiveChunk, Vectorised
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedmerge import FedMerge
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.fedsq import FedSQ
from fedtailor.methods.ifca import IFCA
from fedtailor.methods.local import Local
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.models.attention import attention
from fedtailor.params import moved
from fedtailor.task.task import Task
from fedtailor.testing.subjects import EQUAL, pictures, texts

# some warnings are those of CUDA alone
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

METHODS: dict[str, Method] = {  # one of each family, and the five systems
    one.name: one
    for one in (
        FedAvg(), FedPer(), Ditto(), FedSDG(), IFCA(), FedHFT(warmup_rounds=1), FedMerge(),
        FedSQ(), PFedGate(), FedALA(), Local(),
    )
}  # fmt: skip
ALL = len(EQUAL)  # clients at once
ROUNDS = 5


@pytest.fixture(autouse=True, scope="module")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.exit("no GPU in sight; CUDA_VISIBLE_DEVICES may hide it", returncode=2)
    torch.backends.cudnn.deterministic = True


def graphs() -> Capture:
    return cuda_graphs(torch.device("cuda"))


class Counted:
    """CUDA graphs; counts those that are recorded."""

    def __init__(self) -> None:
        self.capture, self.recorded = graphs(), 0

    def __call__(self, run: Any) -> Any:
        found = self.capture(run)
        self.recorded += 1
        return found


def last_round(method: Method, device: str, make: Any = None, on: Any = texts) -> Round:
    subject = on()
    task = Task(subject.backbone, method.adapt, device=device)
    plan = Plan(
        ROUNDS,
        LocalConfig(batch_size=8),
        CohortConfig(fraction=1.0),
        engine=EngineConfig("sequential", device=device),
        evaluate=EvaluateConfig(every=ROUNDS),
        schedule=ScheduleConfig("cosine"),
    )
    *_, done = rounds(method, task, subject.easy_federation, plan, make_executor=make)
    return done


def on_gpu(method: Method, at_once: Any, capture: Any, on: Any = texts) -> Round:
    made = partial(Vectorised, clients_per_step=at_once, capture=capture)
    return last_round(method, "cuda", made, on)


def differences(one: Round, other: Round) -> dict[str, float]:
    """The largest difference of each tensor of the server's states, and of the losses."""
    states = (moved(each.server, torch.device("cpu")) for each in (one, other))
    a, b = states
    found = {
        n: float((a[n].double() - b[n].double()).abs().max()) if a[n].numel() else 0.0 for n in a
    }
    losses = np.array(one.losses), np.array(other.losses)
    return {**found, "losses": float(np.abs(losses[0] - losses[1]).max())}


@functools.cache
def with_graphs(name: str, at_once: int = ALL) -> tuple[Round, int]:
    """The last round with recorded kernels, and how many recordings there were."""
    counted = Counted()
    return on_gpu(METHODS[name], at_once, counted), counted.recorded


@pytest.mark.parametrize("name", METHODS)
def test_recorded_kernels_give_the_same_bits(name: str) -> None:
    method, (recorded, count) = METHODS[name], with_graphs(name)
    wrong = {n: d for n, d in differences(recorded, on_gpu(method, ALL, None)).items() if d}
    assert wrong == {}
    looks = name == "fedala"  # at the round, so that a recording serves for one alone
    assert looks or (count > 0) == method.recordable


@pytest.mark.parametrize("name", ["fedavg", "fedsdg", "fedala"])
def test_so_they_do_for_one_client_after_the_other(name: str) -> None:
    found, _ = with_graphs(name, 1)
    assert not any(differences(found, on_gpu(METHODS[name], 1, None)).values())


@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_the_numbers_of_a_cpu(name: str) -> None:
    there, here = with_graphs(name)[0], last_round(METHODS[name], "cpu")
    wrong = {n: d for n, d in differences(there, here).items() if not d <= 2e-3}
    chooses = name in ("pfedgate", "fedhft", "ifca")  # blocks or clusters, by numbers nearly equal
    assert chooses or wrong == {}
    for one, other in zip(there.evaluations, here.evaluations, strict=True):
        assert one.num_examples == other.num_examples
        assert one.loss == pytest.approx(other.loss, abs=5e-3)


def test_a_network_of_pictures() -> None:
    one, other = (on_gpu(FedAvg(), 3, capture, pictures) for capture in (graphs(), None))
    assert not any(differences(one, other).values())


def test_how_many_clients_at_once_is_found_out() -> None:
    """Three clients alone, then three rounds of three."""
    found = on_gpu(FedAvg(), AdaptiveChunk(), graphs())
    assert found.executor is not None
    assert int(found.executor.removeprefix("vectorised-")) >= 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_a_cpu(masked: bool, dtype: torch.dtype) -> None:
    shape = (3, 2, 4, 21, 16)  # clients, b, heads, L, d
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=rng) for _ in range(3))
    real = torch.arange(21) < torch.tensor([[21], [13]])
    mask = (1.0 - real[:, None, None].float()) * -1e9 if masked else None
    layer = torch.nn.Identity()

    def slopes(*qkv: torch.Tensor) -> Any:
        def loss(*qkv: torch.Tensor) -> torch.Tensor:
            there = None if mask is None else mask.to(qkv[0].device)
            return attention(layer, *qkv, there)[0].float().square().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(*qkv)

    expected = torch.func.vmap(slopes)(q, k, v)
    found = torch.func.vmap(slopes)(*(x.cuda().to(dtype) for x in (q, k, v)))
    close = 1e-4 if dtype == torch.float32 else 5e-2
    for a, b in zip(found, expected, strict=True):
        assert float((a.float().cpu() - b).norm() / b.norm()) < close


def test_bfloat16_trains() -> None:
    subject, method = texts(), FedSDG()
    task = Task(subject.backbone, method.adapt, device="cuda", precision="bf16")
    plan = Plan(4, LocalConfig(batch_size=8), engine=EngineConfig(device="cuda", precision="bf16"))
    done = list(rounds(method, task, subject.easy_federation, plan))
    assert np.isfinite(done[-1].losses).all()
