"""Worker processes: forked from this one, with their tensors in shared memory.

A child inherits all that there is when it is forked (the task, the data, what has been cached)
without a copy. The server's state reaches it once a round, then one request at a time. A
message is a pickle of structure alone. The tensors in it lie in memory that parent and child share:
a file without a name (``memfd_create``), gone with the last process that has it open. A child ends
when its connection closes, and at once where the parent was killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import GO_ON, InputError
from ...params import Params, same_tensors
from ...user_code import own_faults
from .messages import Place, pack, unpack
from .work import Work

T = TypeVar("T")

_GROWTH = 1 << 20
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def can_fork() -> bool:
    """Whether training works in a forked process: PyTorch refuses to differentiate in one where it
    has threads for CUDA devices."""
    return sys.platform == "linux" and not torch.cuda.is_available()


def check_processes(device: torch.device) -> None:
    """Raise InputError where work can't be given to forked processes."""
    if device.type != "cpu":
        raise InputError(
            f"engine.executor = 'processes' is for the CPU, and the device is {device}; allowed "
            "there: auto, sequential, vectorised"
        )
    if not can_fork():
        raise InputError(
            "engine.executor = 'processes' needs Linux, and no CUDA device in sight (to use the "
            "CPU set CUDA_VISIBLE_DEVICES=''); allowed here: auto, sequential, vectorised"
        )


class Memory:
    """Memory shared with processes forked later. It holds one message's tensors at a time."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedtailor")
        self._mapped = mmap.mmap(-1, 1)

    def close(self) -> None:
        """Let go of the file; tensors that were taken out of it stay valid."""
        os.close(self._file)

    def pack(self, message: object) -> bytes:
        """A pickle of ``message``, whose tensors are written here."""
        data, tensors = pack(message)
        self._reach(max((place.end for place, _ in tensors), default=0))
        for place, value in tensors:
            self._view(place).copy_(value)
        return data

    def unpack(self, data: bytes) -> Any:
        """The message again; its tensors are views, valid until the next `pack`."""
        return unpack(data, self._view)

    def _reach(self, size: int) -> None:
        if size > os.fstat(self._file).st_size:
            os.ftruncate(self._file, -(-size // _GROWTH) * _GROWTH)
        if size > len(self._mapped):  # views of the smaller map keep it alive
            self._mapped = mmap.mmap(self._file, os.fstat(self._file).st_size)

    def _view(self, place: Place) -> Tensor:
        _, offset, dtype, shape = place
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        self._reach(place.end)
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=offset).view(shape)


class Processes:
    """An executor: up to ``most`` processes of one thread each, forked when there is work. What a
    result holds of tensors is valid until the next result is asked for."""

    name = "processes"

    def __init__(self, works: Mapping[str, Work], most: int) -> None:
        self.processes = self.concurrency = most
        self._works = works
        self._children: list[_Child] = []
        self._memory: Memory | None = None  # of the server's state
        self._server: Params | None = None
        self._server_message = b""

    def map(self, name: str, server: Params, items: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """(item, result of work ``name``), in the order in which they get ready."""
        self._publish(server)
        waiting = iter(items)
        busy: dict[Connection, tuple[_Child, T]] = {}
        idle = list(self._children)
        interrupted = True  # in the middle: what is still worked on is not wanted
        try:
            for item in waiting:
                child = idle.pop() if idle else self._fork()
                child.give(name, item, self._server_message)
                busy[child.connection] = child, item
                if not idle and len(self._children) == self.processes:
                    break
            while busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    child, item = busy.pop(ready)
                    result = child.result()
                    for following in waiting:  # one: the child goes on before its result is used
                        child.give(name, following, self._server_message)
                        busy[ready] = child, following
                        break
                    yield item, result
            interrupted = False
        finally:
            if interrupted:
                self.close()

    def _publish(self, server: Params) -> None:
        """Make ``server`` what the children work with from now on."""
        if self._server is not None and same_tensors(self._server, server):
            return
        self._memory = self._memory or Memory()
        self._server_message = self._memory.pack(server)
        self._server = server

    def _fork(self) -> _Child:
        assert self._memory is not None
        child = _Child(self._works, self._memory, self._children, self.processes)
        self._children.append(child)
        return child

    def close(self) -> None:
        """End all processes; those in the middle of something, too."""
        for child in self._children:
            child.end()
        self._children = []
        if self._memory is not None:
            self._memory.close()
        self._memory, self._server = None, None


class _Child:
    """A process as its parent sees it."""

    def __init__(
        self, works: Mapping[str, Work], server: Memory, siblings: list[_Child], most: int
    ) -> None:
        self._title = f"process {len(siblings) + 1} of {most}"
        self._inputs = Memory()
        # by turns: a result may be read while the next one is written
        self._results = (Memory(), Memory())
        self._count = 0
        self._server_message = b""
        self.connection, theirs = multiprocessing.Pipe()
        inherited = [self.connection, *(sibling.connection for sibling in siblings)]
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(works, server, self._inputs, self._results, theirs, inherited, os.getpid()),
            daemon=True,
        )
        with warnings.catch_warnings():  # of threads beside: PyTorch's own are idle, none is used
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def give(self, name: str, item: object, server_message: bytes) -> None:
        """Ask for the result of ``item``; ``server_message`` is the server's state."""
        new_server = None if server_message is self._server_message else server_message
        self._server_message = server_message
        try:
            self.connection.send((name, new_server, self._inputs.pack(item)))
        except BrokenPipeError:
            raise self._died() from None

    def result(self) -> Any:
        """Wait for it; an InputError of the work is raised here, anything else ends the child."""
        try:
            fine, data = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if not fine:
            raise data
        self._count += 1
        return self._results[self._count % 2].unpack(data)

    def _died(self) -> ChildProcessError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}, see above"
        more = ", as happens when memory runs out" if code == -signal.SIGKILL else ""
        return ChildProcessError(errno.ECHILD, f"{how}{more}; {GO_ON}", self._title)

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()
        self._process.close()
        for memory in (self._inputs, *self._results):
            memory.close()


def _serve(
    works: Mapping[str, Work],
    shared: Memory,
    inputs: Memory,
    results: tuple[Memory, Memory],
    connection: Connection,
    inherited: list[Connection],
    parent: int,
) -> None:
    """What a child does until its connection closes, or its ``parent`` dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before that
        return
    gc.freeze()  # the collector need not touch, and so copy, what was inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)  # PyTorch's threads did not survive the fork
    server: Params = {}
    count = 0
    while True:
        try:
            name, new_server, item = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        answer: tuple[bool, bytes | InputError]
        try:
            if new_server is not None:
                server = shared.unpack(new_server)
            with own_faults(of_values=True):
                result = works[name].one(server, inputs.unpack(item))
            count += 1
            answer = True, results[count % 2].pack(result)
        except InputError as error:
            answer = False, error
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
