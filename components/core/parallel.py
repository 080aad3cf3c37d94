"""One single-threaded process per core.

Owns the pool that distillation and evaluation share, and how a process ends with its parent. Its surprising decision:
processes, not threads inside the matrix products, because decoding steps are small and lose more to thread barriers
than they gain; and with one thread each, results do not depend on how many processes there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def _start_worker(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    follow_parent()
    start(*arguments)


def follow_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent closes no pool: without this its workers would wait for work, and hold a model each, for ever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def map_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    processes: int,
    start: Callable[..., None],
    start_arguments: tuple[Any, ...],
) -> Iterator[Result]:
    """Apply ``function`` to every item; yields results as they are ready, in any order.

    Args:
        function: module-level function; finds what ``start`` prepared in its module.
        processes: 1 runs everything in this process.
        start: called once per process with ``start_arguments``.
    """
    if processes <= 1:
        start(*start_arguments)
        yield from map(function, items)
        return
    arguments = (start, start_arguments)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start_worker, initargs=arguments) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            # An error or a stop must not wait for work that nobody will read.
            pool.shutdown(wait=True, cancel_futures=True)
