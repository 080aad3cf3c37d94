"""params.yaml as a whole: its sections together, read and checked, and a stage's view of it.

Owns what must fit together over sections, and the three lines about what is wrong with the file. Its one surprising
decision: a stage gets a *view* of the parameters that holds only the keys its dvc.yaml entry declares, so a key that is
read but not tracked fails at once instead of going stale.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from components.core.config import (
    Benchmark,
    Compare,
    Corpora,
    Data,
    Distil,
    Drafting,
    Evaluate,
    Gates,
    Head,
    Package,
    Registry,
    Runtime,
    Strict,
    Task,
    Train,
    Verify,
)
from components.core.errors import UserError

PARAMS_FILE = Path("params.yaml")


class Params(Strict):
    """All of params.yaml."""

    backbone: Package
    corpora: Corpora
    tasks: dict[str, Task] = Field(min_length=1)
    data: Data
    distil: Distil
    head: Head
    train: Train
    runtime: Runtime
    drafting: Drafting
    evaluate: Evaluate
    verify: Verify
    benchmark: Benchmark
    compare: Compare
    gates: Gates
    registry: Registry

    @field_validator("tasks")
    @classmethod
    def _task_names(cls, tasks: dict[str, Task]) -> dict[str, Task]:
        for name in tasks:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                raise ValueError(f"task name {name!r}: use lower-case letters, digits and _")
        return tasks

    @model_validator(mode="after")
    def _draft_lengths(self) -> Params:
        longest = self.data.max_prompt_tokens + max(task.max_new_tokens for task in self.tasks.values())
        if longest + self.drafting.longest + 1 > self.runtime.max_length:
            raise ValueError(f"runtime.max_length {self.runtime.max_length} cannot hold {longest} tokens and a draft")
        return self


def _first_problem(error: ValidationError) -> tuple[str, str]:
    # A misspelt key is unknown and leaves another one missing: what was written is named, not what was meant.
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    kinds = {"extra_forbidden": "unknown key", "missing": "missing key"}
    seen = kinds.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    if not isinstance(problem.get("input"), dict | Strict):  # a whole section says less than its name
        seen += f" (value {str(problem['input'])[:60]!r})"
    return where, seen


def parse_params(document: Any, name: str = "params.yaml") -> Params:
    """Validate a parsed document.

    Raises:
        UserError: names the first wrong key.
    """
    try:
        return Params.model_validate(document)
    except ValidationError as error:
        where, seen = _first_problem(error)
        count = error.error_count()
        more = f", and {count - 1} more" if count > 1 else ""
        raise UserError(f"{name} is not valid: {where}{more}", seen, f"correct `{where}` in {name}") from None


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate the parameter file.

    Raises:
        UserError: missing, not YAML, or not valid.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", f"no such file in {Path.cwd()}", "run from the project folder") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML", str(error), f"correct {path}, or `git checkout {path}`") from None
    return parse_params(document, str(path))


class ParamsView:
    """A read-only view that lets through declared keys only.

    Args:
        section: a (part of) validated parameters.
        allowed: dotted keys below ``section`` that may be read; a section's name allows all of it.
    """

    def __init__(self, section: Strict, allowed: frozenset[str], prefix: str = "") -> None:
        self._section, self._allowed, self._prefix = section, allowed, prefix

    def __getattr__(self, name: str) -> Any:
        key = f"{self._prefix}{name}"
        value = getattr(self._section, name)
        if key in self._allowed:
            return value
        if any(other.startswith(f"{key}.") for other in self._allowed):
            return ParamsView(value, self._allowed, f"{key}.")
        raise KeyError(f"parameter {key} is read but not declared for this stage in dvc.yaml")
