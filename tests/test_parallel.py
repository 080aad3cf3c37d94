"""The pool of single-threaded processes: all results, errors at once, and no orphans."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.core.parallel import map_processes

ROOT = Path(__file__).resolve().parent.parent
FACTOR: list[int] = []


def prepare(factor: int) -> None:
    FACTOR[:] = [factor]


def times(number: int) -> int:
    if number == 13:
        raise ValueError("unlucky")
    return FACTOR[0] * number


@pytest.mark.parametrize("processes", [1, 2])
def test_every_item_is_done_by_a_prepared_process(processes: int) -> None:
    assert sorted(map_processes(times, range(5), processes, prepare, (10,))) == [0, 10, 20, 30, 40]


def test_an_error_in_a_process_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="unlucky"):
        list(map_processes(times, [1, 13, 2], 2, prepare, (10,)))


PARENT = r"""
import os, signal, sys
from components.core.parallel import map_processes

def start():
    os.write(1, f"{os.getpid()}\n".encode())  # one write: two workers must not share a line

def hang(_):
    signal.pause()

if __name__ == "__main__":
    list(map_processes(hang, [1, 2], 2, start, ()))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open, which Linux has")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command, pipe, null = [sys.executable, str(script)], subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=null, text=True) as parent:
        assert parent.stdout is not None
        try:
            worker = os.pidfd_open(int(parent.stdout.readline()))
        finally:
            parent.send_signal(signal.SIGKILL)  # in any case: nothing else would end it
        ended, _, _ = select.select([worker], [], [], 30)
    os.close(worker)
    assert ended, "the worker outlived its parent"
