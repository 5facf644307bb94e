"""Clients in processes of their own: the same bits, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.executors.processes import Memory, Processes, check_processes
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.private_states import MemoryStates
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedmd import FedMD
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.fedsq import FedSQ
from fedtailor.methods.flora import FLoRA
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.local import Local
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.store.run_directory import locked
from fedtailor.store.trial import TrialStore
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation, same_bits

FEDERATION = digits_federation()
TWO = EngineConfig("processes", processes=2)
PLAN = Plan(rounds=2, local=LocalConfig(batch_size=8), engine=TWO)


def finish(method: Method, plan: Plan) -> tuple[Round, MemoryStates]:
    task = Task(digits_backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    *_, last = rounds(method, task, FEDERATION, plan, store=store)
    return last, store


METHODS: dict[str, Method] = {
    "one model": FedAvg(),
    "a private part": FedSDG(rank=2),
    "nothing sent": Local(),
    "fine-tuned for evaluation": FedAvgFT(),
    "states of different shapes": HeteroFL(),
    "ranks by client": FLoRA(rank=(2, 8, 5)),
    "public examples": FedMD(public_examples=20, public_batch=6),
    "cached results, observed": FedSQ(cache="masks"),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(one, marks=[] if one == "a private part" else pytest.mark.slow)
        for one in METHODS
    ],
)
def test_processes_give_the_same_bits(what: str) -> None:
    plan = replace(PLAN, cohort=CohortConfig(size=3, novel=1))
    one, one_store = finish(METHODS[what], replace(plan, engine=EngineConfig("sequential")))
    two, two_store = finish(METHODS[what], plan)
    assert same_bits(one.server, two.server)
    for client in range(5):
        assert same_bits(one_store.read(client), two_store.read(client))
    assert one.losses == two.losses
    assert one.evaluations == two.evaluations
    assert one.costs == two.costs
    assert (one.bytes_down, one.bytes_up) == (two.bytes_down, two.bytes_up)
    assert same_bits(one.diagnostics, two.diagnostics)
    assert (one.executor, two.executor) == ("sequential", "processes")


@dataclass(frozen=True)
class Numbers:
    """An item for the works below."""

    value: float
    size: int = 1


@dataclass
class Plus:
    """Adds the server's ``x``; ends the process at a value below zero, refuses infinity."""

    def one(self, server: Params, item: Numbers) -> dict[str, Any]:
        if item.value < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if item.value == float("inf"):
            raise InputError("infinity is too much")
        return {"sum": server["x"] + item.value, "process": os.getpid()}


@contextmanager
def two_processes() -> Iterator[Processes]:
    processes = Processes({"plus": Plus()}, 2)
    yield processes
    processes.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[int]:
    """Those forked from this process, which have its command; Python's resource tracker is none."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    command = Path("/proc/self/cmdline").read_bytes()
    found = [int(number) for number in path.read_text().split()]
    return [n for n in found if Path(f"/proc/{n}/cmdline").read_bytes() == command]


def test_processes_live_on_and_hear_of_a_new_state() -> None:
    with two_processes() as processes:
        seen: set[int] = set()
        for x in (torch.zeros(3), torch.ones(3), torch.ones(500_000)):  # grows
            for item, result in processes.map("plus", {"x": x}, map(Numbers, range(7))):
                assert result["sum"].equal(x + item.value)
                seen.add(result["process"])
        assert len(seen) == 2
        assert os.getpid() not in seen


def test_a_result_is_valid_until_the_next_one_is_asked_for() -> None:
    with two_processes() as processes:
        for item, result in processes.map("plus", {"x": torch.zeros(9)}, map(Numbers, range(20))):
            time.sleep(0.002)  # long enough for the next one to be ready
            assert result["sum"].equal(torch.full((9,), float(item.value)))


def test_nothing_is_left_behind() -> None:
    before = open_files(), set(children())
    with two_processes() as processes:
        list(processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, range(4))))
        assert len(set(children()) - before[1]) == 2
    assert (open_files(), set(children())) == before
    with two_processes() as processes:  # left in the middle
        next(processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, range(9))))
    assert (open_files(), set(children())) == before


def test_a_refusal_crosses_over_and_the_processes_end() -> None:
    before = set(children())
    with two_processes() as processes, pytest.raises(InputError, match="infinity is too much"):
        list(processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, [1, float("inf"), 2])))
    assert set(children()) == before


def test_a_process_that_dies_is_named() -> None:
    with two_processes() as processes:
        with pytest.raises(
            ChildProcessError, match=r"process \d of 2.*|killed by signal 9.*memory"
        ):
            list(processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, [1, 2, -1, 3])))
        again = processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, range(3)))
        assert len(list(again)) == 3  # started anew


def test_memory_holds_any_tensor() -> None:
    memory = Memory()
    tensors = {
        "a": torch.randn(3, 4).t(),
        "b": torch.tensor(True),
        "c": torch.empty(0, 5),
        "d": torch.randn(2, 3, dtype=torch.float64)[:, 1],
        "e": torch.randn(7).bfloat16(),
        "f": torch.tensor(2**62),
    }
    back = memory.unpack(memory.pack({"tensors": tensors, "more": [1, "two", None]}))
    memory.close()
    assert back["more"] == [1, "two", None]
    assert same_bits(back["tensors"], tensors)
    assert all(value.dtype == tensors[name].dtype for name, value in back["tensors"].items())


def test_only_the_cpu() -> None:
    with pytest.raises(InputError, match=r"'processes' is for the CPU, and the device is cuda:0"):
        check_processes(torch.device("cuda:0"))


def test_the_first_client_that_diverged_is_named() -> None:
    """Whichever process is done first."""
    method = FedAvg(optimiser=Optimiser("sgd", lr=1e30))
    messages = []
    for engine in (EngineConfig("sequential"), TWO):
        with pytest.raises(InputError) as caught:
            finish(method, replace(PLAN, engine=engine))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_after_a_process_was_killed_the_run_goes_on(tmp_path: Path) -> None:
    method = FedSDG(rank=2)

    def go(path: Path, spoil: Callable[[Round], None]) -> TrialStore:
        task = Task(digits_backbone(), method.adapt)
        folder = TrialStore(path, PLAN.rounds)
        states = folder.open_states(method, task, FEDERATION)
        server, start = folder.restore(states), folder.last.round + 1
        for done in rounds(
            method, task, FEDERATION, PLAN, store=states, server=server, start=start,
            executor=folder.executor,
        ):  # fmt: skip
            folder.commit(done)
            spoil(done)
        folder.finish()
        return folder

    others = set(children())

    def kill(done: Round) -> None:
        if done.number == 1:
            for process in set(children()) - others:
                os.kill(process, signal.SIGKILL)

    with pytest.raises(ChildProcessError, match="goes on after the last committed round"):
        go(tmp_path / "killed", kill)
    assert set(children()) == others
    again = go(tmp_path / "killed", lambda done: None)
    whole = go(tmp_path / "whole", lambda done: None)
    for name in ("server.safetensors", "private.safetensors", "clients.jsonl", "history.jsonl"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes(), name


PROGRAM = """
import os, signal, sys, time, torch
from fedtailor.engine.executors.processes import Processes

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Train:
    def one(self, server, item):
        if item == "sleep":
            time.sleep(1000)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten())
        net(torch.randn(64, 3, 8, 8)).square().sum().backward()
        return (torch.randn(300, 300) @ torch.randn(300, 300)).sum(), os.getpid()

torch.set_num_threads(2)
Train().one({}, 0)  # PyTorch's threads have started
processes = Processes({"train": Train()}, 2)
pids = {pid for _, (_, pid) in processes.map("train", {"x": torch.ones(2)}, range(8))}
print(*pids, flush=True)
if sys.argv[1] == "sleep":
    list(processes.map("train", {"x": torch.ones(2)}, ["sleep", "sleep"]))
if sys.argv[1] == "wait":
    time.sleep(1000)
processes.close()
"""


def start(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    command = [sys.executable, "-c", PROGRAM, how]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    return program, [int(number) for number in program.stdout.readline().split()]


def gone(process: int) -> bool:
    for _ in range(500):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # ended; whoever adopted it has not looked yet
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_parent_of_many_threads_can_fork() -> None:
    program, found = start("end")
    assert program.wait(60) == 0
    assert len(found) == 2
    program.communicate()


@pytest.mark.slow
def test_an_interrupt_ends_busy_processes() -> None:
    program, found = start("sleep")
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    assert program.wait(60) != 0
    program.communicate()
    assert all(gone(process) for process in found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "sleep"])  # idle, and in the middle of a client
def test_processes_end_after_their_parent_was_killed(how: str) -> None:
    program, found = start(how)
    time.sleep(0.2)
    program.kill()
    program.wait(60)
    program.communicate()
    assert all(gone(process) for process in found)


def test_no_process_holds_the_lock_of_its_parent(tmp_path: Path) -> None:
    with two_processes() as processes:
        with locked(tmp_path):
            list(processes.map("plus", {"x": torch.zeros(3)}, map(Numbers, range(4))))
            with pytest.raises(InputError, match="another process"), locked(tmp_path):
                pass
        with locked(tmp_path):
            pass
