"""Fetching pinned files, with the real pip and wheels that lie on disk: no network is used."""

from __future__ import annotations

import errno
import hashlib
import subprocess
from pathlib import Path

import pytest

from components.core.config import Package
from components.core.errors import UserError
from components.data.sources import fetch_file
from helpers_data import write_wheel

CONTENT = b"right wrong\n" * 1000


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def package(sha256: str, file: str = "words/list.txt", source: str = "pypi:tiny-words==1.0.0") -> Package:
    return Package(source=source, sha256=sha256, file=file)


def left_behind(target: Path) -> list[str]:
    """Whatever lies beside the target but the target itself."""
    return [path.name for path in target.parent.iterdir() if path != target] if target.parent.exists() else []


def test_the_one_file_of_a_wheel_is_fetched_and_nothing_else_kept(shelf: Path, tmp_path: Path) -> None:
    _, sha256 = write_wheel(shelf, "tiny-words", "1.0.0", {"words/list.txt": CONTENT, "words/other.py": b"raise 1"})
    target = tmp_path / "raw" / "list.txt"
    fetch_file(package(sha256), target)
    assert target.read_bytes() == CONTENT
    assert left_behind(target) == []


def test_other_bytes_than_pinned_are_refused_and_the_old_file_stays(shelf: Path, tmp_path: Path) -> None:
    wheel, sha256 = write_wheel(shelf, "tiny-words", "1.0.0", {"words/list.txt": CONTENT})
    wheel.unlink()
    _, other = write_wheel(shelf, "tiny-words", "1.0.0", {"words/list.txt": CONTENT + b"!"})
    target = tmp_path / "raw" / "list.txt"
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(UserError) as caught:
        fetch_file(package(sha256), target)
    assert sha256 in caught.value.seen
    assert other in caught.value.seen
    assert target.read_bytes() == b"old"
    assert left_behind(target) == []


def test_a_wheel_with_a_damaged_member_is_refused_even_at_the_pinned_hash(shelf: Path, tmp_path: Path) -> None:
    wheel, _ = write_wheel(shelf, "tiny-words", "1.0.0", {"words/list.txt": CONTENT})
    content = bytearray(wheel.read_bytes())
    content[content.index(b"right wrong")] ^= 0xFF  # stored, so one byte of the text itself: its checksum is now wrong
    wheel.write_bytes(content)
    target = tmp_path / "raw" / "list.txt"
    with pytest.raises(UserError, match="damaged"):
        fetch_file(package(hashlib.sha256(content).hexdigest()), target)
    assert not target.exists()
    assert left_behind(target) == []


@pytest.mark.parametrize("member", ["words/none.txt", "words", "words/"])
def test_a_file_that_the_wheel_does_not_hold_is_named(shelf: Path, tmp_path: Path, member: str) -> None:
    _, sha256 = write_wheel(shelf, "tiny-words", "1.0.0", {"words/": b"", "words/list.txt": CONTENT})
    with pytest.raises(UserError, match="holds no file") as caught:
        fetch_file(package(sha256, member), tmp_path / "raw" / "list.txt")
    assert "`file` in params.yaml" in caught.value.do


def test_a_member_that_climbs_out_of_the_archive_cannot_choose_where_it_lands(shelf: Path, tmp_path: Path) -> None:
    _, sha256 = write_wheel(shelf, "tiny-words", "1.0.0", {"../../escaped.txt": CONTENT})
    target = tmp_path / "raw" / "list.txt"
    fetch_file(package(sha256, "../../escaped.txt"), target)
    assert target.read_bytes() == CONTENT
    assert not list(tmp_path.rglob("escaped.txt"))


def test_an_unknown_version_is_told_from_an_unknown_package(shelf: Path, tmp_path: Path) -> None:
    _, sha256 = write_wheel(shelf, "tiny-words", "1.0.0", {"words/list.txt": CONTENT})
    with pytest.raises(UserError, match="no such version") as caught:
        fetch_file(package(sha256, source="pypi:tiny-words==2.0.0"), tmp_path / "list.txt")
    assert "1.0.0" in caught.value.seen
    with pytest.raises(UserError, match="cannot find no-such-words") as caught:
        fetch_file(package(sha256, source="pypi:no-such-words==2.0.0"), tmp_path / "list.txt")
    assert "ERROR" in caught.value.seen


def test_a_missing_network_is_said_so(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(UserError, match="no network") as caught:
        fetch_file(package("0" * 64, source="pypi:no-such-words==2.0.0"), tmp_path / "list.txt")
    assert caught.value.render().count("\n") == 2


def test_a_full_disk_during_the_download_is_an_error_of_the_disk(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", said))
    with pytest.raises(OSError, match=r"(?i)no space") as caught:
        fetch_file(package("0" * 64), tmp_path / "list.txt")
    assert caught.value.errno == errno.ENOSPC


def test_a_local_file_is_copied_and_its_hash_held(tmp_path: Path) -> None:
    source = tmp_path / "mine.json"
    source.write_bytes(CONTENT)
    fetch_file(Package(source=f"path:{source}"), tmp_path / "raw" / "chat.json")
    assert (tmp_path / "raw" / "chat.json").read_bytes() == CONTENT
    with pytest.raises(UserError, match="wrong sha256"):
        fetch_file(Package(source=f"path:{source}", sha256="0" * 64), tmp_path / "raw" / "chat.json")


@pytest.mark.parametrize(
    ("source", "said"), [("path:none.json", "cannot be read"), ("path:.", "cannot be read"), ("hub:a/b", "single file")]
)
def test_a_source_that_gives_no_file_is_refused(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        fetch_file(Package(source=source), tmp_path / "chat.json")
