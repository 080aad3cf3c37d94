"""One single-threaded process per core.

Owns the pool that distillation and evaluation share. Its surprising decision: processes, not threads inside the matrix
products, because decoding steps are small and lose more to thread barriers than they gain; and with one thread each,
results do not depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=start, initargs=start_arguments) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            # An error or a stop must not wait for work that nobody will read.
            pool.shutdown(wait=True, cancel_futures=True)
