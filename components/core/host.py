"""What machine this is, and how much of it we may use.

Owns the thread count and the host card printed beside every figure. Standard library only: it also runs on devices.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

QUIET_ENVIRONMENT = {
    "ORT_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_quiet_environment() -> None:
    """Switch every dependency's telemetry off unless the user has set the variable already."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class HostCard:
    """The machine a figure was measured on."""

    machine: str
    cpu: str
    cores_allowed: int
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def allowed_cores() -> int:
    """Cores this process may run on (affinity, not the number in the box)."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)


def resolve_threads(requested: int) -> int:
    """Threads to use: ``requested`` or, at 0, every allowed core; never more than the allowed cores."""
    cores = allowed_cores()
    return cores if requested == 0 else min(requested, cores)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """CPU model as the kernel names it, or the architecture where it gives none (most ARM)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return names[0] if names else platform.machine()


def memory_bytes() -> int:
    """Physical memory in bytes, 0 when unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions of ``names``; packages that are absent are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def host_card(*packages: str) -> HostCard:
    """Describe this machine and the versions of ``packages``."""
    return HostCard(
        machine=platform.machine(),
        cpu=cpu_name(),
        cores_allowed=allowed_cores(),
        memory_bytes=memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=package_versions(*packages),
    )
