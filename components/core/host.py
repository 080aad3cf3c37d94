"""What machine this is, and how much of it we may use.

Owns the thread count and the host card printed beside every figure. Standard library only: it also runs on devices. Its
surprising decision: a container's CPU quota counts as cores, because more threads than the quota are only put to sleep.
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
    """Cores' worth of time this process may use: affinity and container quota, not the number in the box."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, min(cores, quota_cores() or cores))


def quota_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Whole cores that the CPU quotas of our control groups leave us, at least 1; None without a quota.

    Args:
        groups: the kernel's list of our groups, lines of NUMBER:CONTROLLERS:PATH (no controllers: version 2).
        root: where the groups are mounted; in a container that may be our own group, whatever PATH says.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    quotas = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        names = controllers.split(",")
        mounts = [""] if controllers == "" else ["cpu", "cpu,cpuacct"] if "cpu" in names else []
        for folder in (root / mount for mount in mounts):
            group = folder / path.strip("/")
            quotas += [_group_quota(place) for place in (group, *group.parents) if place.is_relative_to(folder)]
    shares = [quota for quota in quotas if quota is not None]
    return max(1, int(min(shares))) if shares else None


def _group_quota(group: Path) -> float | None:
    """Cores of one control group by its own files, version 2 then 1; None where it has no quota."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((group / name).read_text(encoding="ascii") for name in names)
        cores = int(quota) / int(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None  # version 1 writes -1 for no quota


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
