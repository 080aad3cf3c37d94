"""Run `dvc repro` as a child process and say clearly what went wrong.

Owns the child's environment, the check for free disk space and the relay of output, for the command line and for the
Prefect flow alike. It refuses to start on a disk that cannot hold the results. Its surprising decision: a stage's own
three lines are repeated at the very end, because DVC prints lines of its own after them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.core import paths
from components.core.errors import UserError, disk_full, says_disk_full
from components.core.files import write_json
from components.core.host import QUIET_ENVIRONMENT
from components.core.params import load_params
from pipelines.stages.common import load_stages

# Backbone, features, head and bundle take about 2.5 GB, and as much again where DVC's cache cannot use hard links; the
# registered copy of the bundle, MLflow's and Prefect's stores and temporary files take the rest.
WHOLE_RUN_BYTES = 6 * 2**30
SPARE_BYTES = 2**29  # needed even when everything is there already
RESULT_FOLDERS = (Path("data"), Path("models"))

THREE_LINES = re.compile(r"^error: (?P<what>.*)\n seen: (?P<seen>.*)\n next: (?P<do>.*)$", re.MULTILINE)
FAILED_STAGE = re.compile(r"failed to reproduce '([^']+)'")
KEPT_LINES = 200
RWLOCK = Path(".dvc/tmp/rwlock")
Echo = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a child process, mostly `dvc`, ended.

    Attributes:
        code: its exit status; negative when a signal ended it.
        tail: its last lines, joined.
    """

    code: int
    tail: str

    def fault(self, what: str) -> UserError:
        """Three lines about a run that failed: the child's own where it left any, else about ``what``."""
        found = list(THREE_LINES.finditer(self.tail))
        if found:
            return UserError(*found[-1].group("what", "seen", "do"))
        if named := FAILED_STAGE.search(self.tail):
            what = f"stage {named.group(1)}"
        if says_disk_full(self.tail):
            return disk_full(OSError(errno.ENOSPC, "No space left on device"))
        if "Unable to acquire lock" in self.tail or "is busy, it is being blocked by" in self.tail:
            return UserError("another dvc command is at work here", "DVC's lock is held", "wait for it to end")
        lines = [line for line in self.tail.splitlines() if line.strip() and not FAILED_STAGE.search(line)]
        errors = [line for line in lines if line.startswith("ERROR")]  # DVC ends with advice that says nothing
        seen = (errors or lines or [f"exit status {self.code}"])[-1]
        if self.code < 0:
            seen = f"ended by signal {-self.code}"
        return UserError(f"{what} failed", seen, "read the output above, then run the same command again")


def child_environment() -> dict[str, str]:
    """Environment for stages: quiet dependencies, the interpreter that runs us first on PATH, unbuffered output."""
    environment = {**QUIET_ENVIRONMENT, **os.environ}
    here = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([here, environment.get("PATH", os.defpath)])
    environment["PYTHONUNBUFFERED"] = "1"
    # Idle OpenMP threads sleep instead of spinning: on a busy machine, spinning made training several times slower.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("TQDM_DISABLE", "1")  # libraries' moving bars; stages print lines of their own
    return environment


def stored_bytes(folders: Iterable[Path] = RESULT_FOLDERS) -> int:
    """Bytes that results of earlier runs take already."""
    return sum(path.lstat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def check_disk(needed_bytes: int = WHOLE_RUN_BYTES, folder: Path = Path()) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        UserError: too little is free.
    """
    needed = max(needed_bytes - stored_bytes(), SPARE_BYTES)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            "there is too little disk space for a run",
            f"{free / 2**30:.1f} GiB free in {folder.resolve()}, about {needed / 2**30:.1f} GiB needed",
            "free some space (df -h .), then run the same command again",
        )


def run_dvc(arguments: Sequence[str], echo: Echo) -> Ended:
    """Run a `dvc` command, passing its output on line by line.

    Args:
        arguments: after `dvc`.
        echo: gets every line, without its end.
    """
    drop_dead_locks()
    command = [sys.executable, "-m", "dvc", *arguments]
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                tail.append(line.rstrip("\n"))
                echo(tail[-1])
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()  # the terminal has interrupted it as well: let it clean up, so that no lock is left
            raise
    return Ended(code, "\n".join(tail))


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie; True where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def drop_dead_locks(file: Path = RWLOCK) -> None:
    """Forget what killed `dvc` processes left in DVC's lock file: {"write": {path: holder}, "read": {path: [holder]}}.

    DVC does so itself, but takes a zombie for a living process; where nobody reaps one, it would refuse for ever. A
    file that was cut off by a kill holds nothing worth keeping.
    """
    try:
        locks = json.loads(file.read_text(encoding="utf-8"))
        write = {path: holder for path, holder in locks.get("write", {}).items() if is_running(holder["pid"])}
        held = {path: [one for one in all_ if is_running(one["pid"])] for path, all_ in locks.get("read", {}).items()}
    except FileNotFoundError:
        return
    except ValueError:
        file.unlink(missing_ok=True)
        return
    except (AttributeError, KeyError, TypeError):
        return  # another format than we know: DVC's own affair
    write_json(file, {"write": write, "read": {path: holders for path, holders in held.items() if holders}})


def known_stages(wanted: Sequence[str]) -> None:
    """Check that dvc.yaml has every stage in ``wanted``.

    Raises:
        UserError: dvc.yaml has no such stage.
    """
    stages = load_stages()
    for name in wanted:
        if name not in stages:
            raise UserError(
                f"dvc.yaml has no stage {name!r}", f"stages: {', '.join(stages)}", "correct the stage's name"
            )


def check_ready(stages: Sequence[str] = ()) -> None:
    """What can be known to be wrong before anything starts.

    Raises:
        UserError: wrong parameters, an unknown stage, or too little space.
    """
    load_params()
    known_stages(stages)
    check_disk()


def reproduce(stages: Sequence[str], echo: Echo, single: bool = False) -> None:
    """Bring ``stages`` (all, when empty) and what they need up to date.

    Args:
        stages: names from dvc.yaml.
        echo: gets every line of output.
        single: only the stage itself, not what it needs.

    Raises:
        UserError: wrong parameters, too little space, or a stage that failed.
    """
    check_ready(stages)
    options = ["--single-item"] if single else []
    run = run_dvc(["repro", *options, *stages], echo)
    if run.code != 0:
        raise run.fault(f"stage {stages[0]}" if stages else "`dvc repro`")


def has_results() -> bool:
    """Whether there is anything to report on."""
    return paths.VERIFICATION_REPORT.is_file() or paths.BENCHMARK_REPORT.is_file()
