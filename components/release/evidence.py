"""Evidence files as the gate sees them: what they hold, or why they cannot be used.

Owns the reading of models/reports and of the bundle's manifest for the decision, and their hashes. It refuses numbers
that are not finite and rows measured on no prompt. Its surprising decision: a missing or broken file is no exception
here but a value with its reason, because for the gate it is an answer ("refused, since ..").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from components.core import paths
from components.core.files import sha256_file
from components.core.manifest import MANIFEST_FILE


class Unusable(Exception):
    """Evidence does not hold the wanted value; the text is the reason that the rule gives."""


@dataclass(frozen=True)
class Source:
    """One evidence file as it was read.

    Attributes:
        path: where it lies, relative to the project when it is inside.
        sha256: of its bytes, "" when it could not be read.
        document: its JSON, None when it could not be read.
        problem: why it could not be read, "" when it could.
    """

    path: str
    sha256: str
    document: Any
    problem: str = ""

    def at(self, *keys: str) -> Any:
        """The value below ``keys``.

        Raises:
            Unusable: the file or the key is missing.
        """
        if self.problem:
            raise Unusable(self.problem)
        value = self.document
        for depth, key in enumerate(keys):
            if not isinstance(value, Mapping) or key not in value:
                raise Unusable(f"has no {'.'.join(keys[: depth + 1])}")
            value = value[key]
        return value

    def text(self, *keys: str) -> str:
        """A text that is not empty."""
        value = self.at(*keys)
        if not isinstance(value, str) or not value:
            raise Unusable(f"{'.'.join(keys)} is {value!r}, not a text")
        return value

    def names(self, *keys: str) -> list[str]:
        """Sorted keys of an object that is not empty."""
        value = self.at(*keys)
        if not isinstance(value, Mapping) or not value:
            raise Unusable(f"{'.'.join(keys)} names nothing")
        return sorted(map(str, value))

    def tasks(self) -> dict[str, Mapping[str, Any]]:
        """Rows of ``tasks`` by name; each must have measured at least one prompt."""
        rows = self.at("tasks")
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "task" in row for row in rows):
            raise Unusable("tasks is not a list of rows")
        names = [str(row["task"]) for row in rows]
        if len(set(names)) < len(names):
            raise Unusable(f"a task has two rows: {sorted(names)}")
        return dict(zip(names, rows, strict=True))

    def task_number(self, task: str, key: str) -> float:
        """A finite figure of one task, measured on at least one prompt."""
        rows = self.tasks()
        if task not in rows:
            raise Unusable(f"has no task {task}")
        if finite(rows[task].get("prompts"), f"{task}.prompts") < 1:
            raise Unusable(f"{task} was measured on no prompt")
        return finite(rows[task].get(key), f"{task}.{key}")


def finite(value: Any, name: str) -> float:
    """``value`` as a float; booleans, NaN and infinity are Unusable."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Unusable(f"{name} is {value!r}, not a finite number")
    return float(value)


@dataclass(frozen=True)
class Evidence:
    """Every file that the decision rests on."""

    manifest: Source
    prompts: Source
    distilled: Source
    training: Source
    evaluation: Source
    export: Source
    verification: Source
    benchmark: Source


def read_source(path: Path) -> Source:
    """Read one evidence file; what cannot be read becomes a Source with its problem."""
    try:
        text, digest = path.read_text(encoding="utf-8"), sha256_file(path)
        return Source(path.as_posix(), digest, json.loads(text))
    except FileNotFoundError:
        return Source(path.as_posix(), "", None, "no such file")
    except (OSError, ValueError) as error:
        return Source(path.as_posix(), "", None, f"not readable JSON: {' '.join(str(error).split())[:120]}")


def load_evidence(reports: Path = paths.REPORTS, bundle: Path = paths.BUNDLE) -> Evidence:
    """Read the evidence of ``bundle`` from the ``reports`` folder; a missing or broken file raises nothing."""

    def below(path: Path) -> Source:
        return read_source(reports / path.relative_to(paths.REPORTS))

    return Evidence(
        manifest=read_source(bundle / MANIFEST_FILE),
        prompts=below(paths.CONTRACTS / "prompts.json"),
        distilled=below(paths.CONTRACTS / "distilled.json"),
        training=below(paths.TRAINING_REPORT),
        evaluation=below(paths.EVALUATION_REPORT),
        export=below(paths.EXPORT_REPORT),
        verification=below(paths.VERIFICATION_REPORT),
        benchmark=below(paths.BENCHMARK_REPORT),
    )


def evidence_files(evidence: Evidence) -> tuple[str, ...]:
    """Paths of the evidence that could be read, the manifest (part of the bundle) left out."""
    sources = (getattr(evidence, field.name) for field in fields(evidence) if field.name != "manifest")
    return tuple(source.path for source in sources if not source.problem)
