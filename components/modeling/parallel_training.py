"""Processes that make each training step together, on the cores of one machine.

Owns what processes say to each other (sums, and what the leader decides), how they start, and what becomes of all when
one dies. It refuses averages: a mean of means weighs a token by the company it keeps, so sums and counts are added up
instead. Its surprising decision: a process alone is a world too, one in which adding up returns what it was given; so
training is written once, and a single process neither imports nor pays for any of this.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from components.core.errors import EXIT_USER_ERROR, UserError
from components.core.parallel import follow_parent
from components.core.paths import WORK

GRACE_S = 30.0  # for the others to record that they failed, once one has died
LONGEST_MESSAGE = 20_000  # a pipe holds 64 KiB; a message that does not fit would block its sender
LONGEST_WAIT = timedelta(minutes=60)  # the leader decodes its validation prompts while the others wait

Item = TypeVar("Item")
Result = TypeVar("Result")


class World:
    """A process that trains alone.

    Attributes:
        rank: number of this process; 0 leads.
        size: processes in all.
    """

    rank, size = 0, 1

    @property
    def leads(self) -> bool:
        """Whether this process validates, logs and saves."""
        return self.rank == 0

    def share_of(self, items: Sequence[Item]) -> list[Item]:
        """This process's part of ``items``, none where there are fewer than processes."""
        return list(items[self.rank :: self.size])

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, the same bits in each; any shape, but the same one in each."""
        return tensor

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Put the sum over all processes into each gradient; a process without gradients adds zeros."""

    def told(self, make: Callable[[], Result]) -> Result:
        """What ``make`` gives, called by the leader alone; the others wait for it."""
        return make()


class SharedWorld(World):
    """One of several processes, met over gloo on this machine's own loopback.

    Args:
        rank, size: see :class:`World`.
        meeting: path of a file that does not exist yet, the same for all.
    """

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        from accelerate import PartialState

        self.rank, self.size = rank, size
        # OMP_NUM_THREADS speaks to accelerate alone, which would set the threads itself: torch has read it already.
        known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in known.items()})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._state = PartialState(cpu=True, backend="gloo", init_method=f"file://{meeting}", timeout=LONGEST_WAIT)

    def add_up(self, tensor: Tensor) -> Tensor:
        """See :meth:`World.add_up`."""
        from accelerate.utils import reduce

        whole: Tensor = reduce(tensor, "sum")
        return whole

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """See :meth:`World.add_up_gradients`; one message for all of them."""
        taught = list(parameters)
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in taught]
        whole = self.add_up(torch.cat([gradient.flatten() for gradient in mine]))
        for parameter, gradient in zip(taught, whole.split([p.numel() for p in taught]), strict=True):
            parameter.grad = gradient.view_as(parameter)

    def told(self, make: Callable[[], Result]) -> Result:
        """See :meth:`World.told`; the result must be picklable."""
        from accelerate.utils import broadcast_object_list

        told: list[Result] = broadcast_object_list([make() if self.leads else None])
        return told[0]

    def leave(self) -> None:
        """Close what is open between the processes."""
        self._state.destroy_process_group()


def run_together(work: Callable[..., None], size: int, *arguments: Any) -> None:
    """Run ``work(world, *arguments)`` in ``size`` processes to its end; when one fails, all end.

    Args:
        work: module-level function.
        size: processes; this one only waits for them.
        arguments: picklable.

    Raises:
        UserError: what a process raised, or that one was killed.
        RuntimeError: a process failed otherwise; holds its traceback.
    """
    # The server imports once and forks from there. The optimizer's first step would import dynamo, four seconds of it.
    context = get_context("forkserver")
    context.set_forkserver_preload(["accelerate", "torch._dynamo", work.__module__])
    faults = context.SimpleQueue()
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        told = (work, size, Path(folder).resolve() / "meeting", faults, arguments)
        together = start_processes(_take_part, told, size, join=False, daemon=True, start_method="forkserver")
        try:
            while not together.join(grace_period=GRACE_S):
                pass
        except ProcessExitedException:
            exit_codes = [process.exitcode for process in together.processes]
            raise _cause(exit_codes, None if faults.empty() else faults.get()) from None


def _take_part(rank: int, work: Callable[..., None], size: int, meeting: Path, faults: Any, arguments: Any) -> None:
    follow_parent()
    try:
        world = SharedWorld(rank, size, meeting)
        work(world, *arguments)
        world.leave()
    except UserError as error:
        faults.put((error.what, error.seen, error.do))
        raise SystemExit(EXIT_USER_ERROR) from None
    except Exception as error:
        faults.put(f"process {rank} of {size}: {''.join(traceback.format_exception(error))}"[-LONGEST_MESSAGE:])
        raise SystemExit(1) from None


def _cause(exit_codes: Sequence[int | None], first_fault: Any) -> Exception:
    """What failed first: whoever loses its connection to a failed process fails too, and says so later.

    Args:
        exit_codes: of all processes.
        first_fault: the lines of a UserError, a traceback, or None where nothing was said.
    """
    killed = [-code for code in exit_codes if code is not None and code < 0 and code != -signal.SIGTERM]
    if killed:
        return UserError(
            f"one of {len(exit_codes)} training processes was killed",
            signal.Signals(killed[0]).name,
            "run the same command again, it goes on from the last checkpoint; short of memory: lower train.processes",
        )
    if isinstance(first_fault, tuple):
        return UserError(*first_fault)
    return RuntimeError(first_fault or f"training processes ended with {exit_codes}")
