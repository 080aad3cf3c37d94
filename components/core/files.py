"""Files that exist only when they are whole.

Owns atomic writes and content hashes. Its one surprising decision: a temporary name lies beside the target, not in
/tmp, because a move is atomic on one file system only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.core.errors import UserError

CHUNK_BYTES = 1 << 20


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; move it into place when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; it replaces ``target`` when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(target: Path, document: Any) -> None:
    """Write ``document`` as indented JSON, atomically; NaN and infinity raise ValueError."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file that a stage made.

    Raises:
        UserError: missing or not JSON; ``remedy`` is what to type next.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "no such file", remedy) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON", str(error), remedy) from None


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_folder(folder: Path) -> str:
    """Hex sha256 over the sorted relative names and contents of every file below ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
