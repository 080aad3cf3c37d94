"""How much of a machine we may use: affinity, and the CPU quotas of control groups as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.core import host

HYBRID = "9:name=systemd:/\n4:memory:/a\n2:cpuacct:/\n1:cpu:/jobs/7\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="docker --cpus 2"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 2, id="docker --cpus 2.5"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 1, id="docker --cpus 0.5"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="version 2 without a quota"),
        pytest.param(
            "0::/user.slice/app.scope\n",
            {"user.slice/cpu.max": "300000 100000\n", "user.slice/app.scope/cpu.max": "max 100000\n"},
            3,
            id="the slice above us has the quota",
        ),
        pytest.param(
            "0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "1600000 100000\n"}, 4, id="the least counts"
        ),
        pytest.param(
            "5:cpu,cpuacct:/docker/0d3f\n3:cpuset:/docker/0d3f\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"},
            3,
            id="version 1 in docker, which mounts our group as the root",
        ),
        pytest.param(
            HYBRID,
            {"cpu/jobs/7/cpu.cfs_quota_us": "600000\n", "cpu/jobs/7/cpu.cfs_period_us": "100000\n"},
            6,
            id="version 1 beside an empty version 2",
        ),
        pytest.param(
            HYBRID,
            {"cpu/jobs/7/cpu.cfs_quota_us": "-1\n", "cpu/jobs/7/cpu.cfs_period_us": "100000\n"},
            None,
            id="version 1 without a quota",
        ),
        pytest.param("0::/elsewhere\n", {"other/cpu.max": "100000 100000\n"}, None, id="a quota of others"),
        pytest.param("nonsense\n\n", {"cpu.max": "100000 100000\n"}, None, id="no list of groups"),
        pytest.param("0::/\n", {"cpu.max": "\n"}, None, id="an empty file"),
    ],
)
def test_a_quota_counts_as_cores(groups: str, files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    for name, text in {"groups": groups, **{f"root/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.quota_cores(tmp_path / "groups", tmp_path / "root") == cores


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert host.quota_cores(tmp_path / "no such file", tmp_path) is None


@pytest.mark.parametrize(("quota", "allowed"), [(None, 8), (2, 2), (64, 8)])
def test_threads_respect_affinity_and_quota(quota: int | None, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "quota_cores", lambda: quota)
    assert [host.resolve_threads(wanted) for wanted in (0, 1, 16)] == [allowed, 1, allowed]
