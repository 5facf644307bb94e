"""The ranks that torchrun has started, and what they say to each other over ``torch.distributed``.

The first rank leads: it tells all others what is next, and hands things to one of them. Tensors on
a CPU travel over gloo, those on a GPU over NCCL. Where a rank ends, its connections end, and so do
the ranks that talk to it: whichever is the first to know says why, the others end in silence.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ...errors import GO_ON, InputError
from ...torch_private import use_count
from .messages import Place, pack, unpack

_JOIN = timedelta(minutes=5)

_SILENCE = timedelta(hours=6)  # of a rank that is waited for; one that has ended is noticed at once

_PRECEDENCE = 2.0  # seconds: what is wrong with the input on all ranks is the first one's to say


def gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


@dataclass(frozen=True)
class Transfer:
    """A message on its way; the tensors have to live until it is there."""

    rank: int
    transfers: list[dist.Work | None]
    parts: list[Tensor]

    def wait(self) -> None:
        """Until it has been received."""
        with _connected(self.rank):
            for transfer in self.transfers:
                assert transfer is not None
                transfer.wait()


class ProcessGroup:
    """This process, the one of ``rank``, among ``size``; ``local_size`` of them on this host."""

    def __init__(self, rank: int, size: int, local_size: int, store: Store) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self._store = store
        self._ending = False
        self._gpu = torch.device("cuda", torch.cuda.current_device()) if gpus() else None
        self._on_gpu = Lock()  # one transfer at a time

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def others(self) -> range:
        """The ranks that are led."""
        return range(1, self.size)

    def check_device(self, device: torch.device) -> None:
        """Raise InputError if the ranks of this host can't each have a device of their own."""
        if device.type == "cuda" and device.index is not None:
            raise InputError(
                f"engine.device = '{device}' is one GPU for {self.size} ranks; allowed: auto, cpu, "
                "cuda (for every rank the GPU of its number)"
            )
        if device.type == "cuda" and self.local_size > gpus():
            raise InputError(
                f"{self.local_size} ranks on {socket.gethostname()}, which has {gpus()} GPUs; "
                f"start {gpus()} there (--nproc-per-node {gpus()}), or set engine.device to cpu"
            )

    def broadcast(self, message: object) -> None:
        """Send to all others, which `receive` it; nothing once this rank ends."""
        if self._ending:
            return
        with _connected():
            for part in self._packed(message):
                _broadcast(part)

    def receive(self) -> Any:
        """What the first rank tells all."""
        with _connected(0):
            return self._read(_broadcast)

    def send_to(self, rank: int, message: object) -> Transfer:
        """Send to one rank, without waiting."""
        with _connected(rank):
            parts = self._packed(message)
            return Transfer(rank, [dist.isend(part, rank) for part in parts], parts)

    def receive_from(self, rank: int) -> Any:
        """The next message of one rank."""
        with _connected(rank):
            return self._read(lambda part: dist.recv(part, rank))

    def _packed(self, message: object) -> list[Tensor]:
        """How long its parts are; tensors and structure, on the CPU; tensors on a GPU, if any."""
        structure, tensors = pack(message)
        ends = {"cpu": 0, "cuda": 0}
        for place, _ in tensors:
            ends[place.device] = max(ends[place.device], place.end)
        bytes_ = {"cpu": torch.empty(ends["cpu"] + len(structure), dtype=torch.uint8)}
        if ends["cuda"]:
            bytes_["cuda"] = torch.empty(ends["cuda"], dtype=torch.uint8, device=self._gpu)
        for place, value in tensors:
            _view(bytes_[place.device], place).copy_(value)
        bytes_["cpu"][ends["cpu"] :] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        return [torch.tensor([ends["cpu"], len(bytes_["cpu"]), ends["cuda"]]), *bytes_.values()]

    def _read(self, fill: Callable[[Tensor], object]) -> Any:
        head = torch.empty(3, dtype=torch.int64)
        fill(head)
        tensors, end, gpu = head.tolist()
        bytes_ = {"cpu": torch.empty(end, dtype=torch.uint8)}
        fill(bytes_["cpu"])
        if gpu:
            with self._on_gpu:
                bytes_["cuda"] = torch.empty(gpu, dtype=torch.uint8, device=self._gpu)
                fill(bytes_["cuda"])
        structure = bytes_["cpu"][tensors:].numpy().tobytes()
        return unpack(structure, lambda place: _view(bytes_[place.device], place))

    def check_consistent(self, mark: Mapping[str, Any]) -> None:
        """Compare what must be the same on all ranks, by name. Raises InputError where it isn't."""
        wrong = None
        if self.is_leader:
            for rank in self.others:
                host, theirs = self.receive_from(rank)
                differs = [name for name, value in mark.items() if theirs[name] != value]
                if differs and wrong is None:
                    wrong = f"rank {rank} on {host} has another {' and another '.join(differs)}"
            self.broadcast(wrong)
        else:
            self.send_to(0, (socket.gethostname(), dict(mark))).wait()
            wrong = self.receive()
        if wrong is not None:
            raise InputError(f"{wrong} than rank 0; all ranks must have the same")

    def claim_error(self) -> bool:
        """Whether this rank is the one that says why the run ends: the first that asked."""
        try:
            return bool(self._store.add("fedtailor: said", 1) == 1)
        except RuntimeError:  # the store has ended: so has the host of the first rank
            return True

    def on_sigterm(self, number: int, frame: object) -> None:
        """What the first rank does on SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        how = "told to end (SIGTERM), as torchrun does where another rank has failed"
        raise ChildProcessError(errno.ECHILD, f"{how}; {GO_ON}", f"rank {self.rank}")

    def end(self, error: BaseException) -> None:
        """Exit with code 2, unless it is for this rank to say what is wrong."""
        self._ending = True
        if self.is_leader:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it does end
        elif isinstance(error, InputError):
            time.sleep(_PRECEDENCE)
        is_reported = not self.claim_error()
        if is_reported and isinstance(error, InputError | OSError | KeyboardInterrupt):
            raise SystemExit(2)
        if isinstance(error, InputError) and not self.is_leader:
            raise InputError(f"{error} (rank {self.rank} on {socket.gethostname()})")


@contextmanager
def init_process_group() -> Iterator[ProcessGroup | None]:
    """The other ranks, if torchrun has started several.

    An error that ends this rank is raised where the rank is the first to have one; any other rank
    exits with code 2.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield None
        return
    store, rank, size = next(rendezvous("env://", timeout=_JOIN))
    if gpus():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus())
    backend = "cpu:gloo,cuda:nccl" if gpus() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_SILENCE)
    group = ProcessGroup(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), store)
    before = signal.getsignal(signal.SIGTERM)
    if group.is_leader:
        signal.signal(signal.SIGTERM, group.on_sigterm)
    try:
        yield group
    except BaseException as error:
        group.end(error)
        raise
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()


@contextmanager
def _connected(rank: int | None = None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        how = str(error).partition(". ")[0].rpartition("] ")[2]
        message = f"the connection to it has ended ({how}); {GO_ON}"
        title = "another rank" if rank is None else f"rank {rank}"
        raise ChildProcessError(errno.ECHILD, message, title) from None


def _broadcast(part: Tensor) -> None:
    """From the first rank; until no thread of gloo holds ``part`` any more.

    A thread that lets go of a tensor last needs Python's lock, which ``destroy_process_group``
    holds while it waits for the thread: both would wait for ever.
    """
    dist.broadcast(part, 0)
    while part.device.type == "cpu" and use_count(part) > 1:
        time.sleep(0)


def _view(bytes_: Tensor, place: Place) -> Tensor:
    return bytes_[place.offset : place.end].view(place.dtype).view(place.shape)
