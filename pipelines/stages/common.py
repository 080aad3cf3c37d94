"""What every stage does first: quiet dependencies, validated parameters, and only the parameters it declares.

Its surprising decision: which parameters a stage may read is not repeated in Python; it is read from dvc.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from components.core.errors import UserError
from components.core.host import set_quiet_environment
from components.core.params import ParamsView, load_params

DVC_FILE = Path("dvc.yaml")


def load_stages(path: Path = DVC_FILE) -> dict[str, dict[str, Any]]:
    """The stages of dvc.yaml, in the order in which the file tells the story.

    Raises:
        UserError: missing or not YAML.
    """
    try:
        stages: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["stages"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read", str(error), "run from the project folder") from None
    return stages


def stage_params(stage: str) -> Any:
    """Parameters for ``stage``: a view that lets through what dvc.yaml declares for it and nothing else.

    Raises:
        UserError: the parameter file is wrong, or there is no such stage.
    """
    set_quiet_environment()
    stages = load_stages()
    if stage not in stages:
        raise UserError(f"dvc.yaml has no stage {stage!r}", f"stages: {', '.join(stages)}", "correct the stage's name")
    return ParamsView(load_params(), frozenset(stages[stage].get("params", ())))
