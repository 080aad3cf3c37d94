"""A bundle as an MLflow model: a table of tasks and texts in, answers and what they cost out.

Owns the pyfunc, its signature and the folder that is registered. It refuses pickles: MLflow runs this very file
("models from code") beside a copy of `components/`, so a model loads where the repository is not. Its surprising
decision: the bundle's own bytes are copied in untouched, so the hash of what is served is the hash that was verified.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
from mlflow.models import ModelSignature, set_model
from mlflow.pyfunc.model import PythonModel
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

import components
from components.core.errors import UserError
from components.core.host import package_versions
from components.data.free_text import fill_from_text
from components.onnx.runtime import Bundle, open_bundle

ARTIFACT = "bundle"
RUNTIME_PACKAGES = ("mlflow", "onnxruntime", "numpy", "tokenizers", "pandas", "pydantic", "pyyaml")


def signature() -> ModelSignature:
    """Written by hand: one row a request; ``text`` or ``slots`` (a JSON object) fills the prompt.

    An answer begins with what it was ``given`` to begin with, often nothing; the counts are about the rest.
    """
    return ModelSignature(
        inputs=Schema(
            [
                ColSpec(DataType.string, "task"),
                ColSpec(DataType.string, "text", required=False),
                ColSpec(DataType.string, "slots", required=False),
            ]
        ),
        outputs=Schema(
            [
                ColSpec(DataType.string, "text"),
                ColSpec(DataType.string, "given"),
                ColSpec(DataType.string, "stop_reason"),
                ColSpec(DataType.long, "tokens"),
                ColSpec(DataType.long, "passes"),
                ColSpec(DataType.double, "tokens_per_pass"),
            ]
        ),
        params=ParamSchema([ParamSpec("draft", DataType.boolean, True)]),
    )


class BundleModel(PythonModel):
    """Answers requests with one loaded bundle."""

    bundle: Bundle

    def load_context(self, context: Any) -> None:
        """Open the bundle that lies among the model's artifacts; ``model_config`` may hold ``threads``."""
        threads = int((context.model_config or {}).get("threads", 0))
        self.bundle = open_bundle(Path(context.artifacts[ARTIFACT]), threads)

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Answer every row.

        Args:
            context: unused; the bundle is already open.
            model_input: table with ``task`` and ``text`` or ``slots``.
            params: ``draft`` False decodes with the backbone alone.

        Returns:
            A table as in :func:`signature`, rows in the order of the requests.

        Raises:
            UserError: unknown task, or a slot that stays empty.
        """
        draft = bool((params or {}).get("draft", True))
        return pd.DataFrame([self._answer(row, draft) for row in model_input.to_dict(orient="records")])

    def _answer(self, row: Mapping[Any, Any], draft: bool) -> dict[str, Any]:
        task = str(row["task"])
        slots = fill_from_text(self.bundle.task(task), _text(row.get("text")), _slots(row.get("slots")))
        opening = self.bundle.opening(task, slots)
        generation = self.bundle.complete(task, slots, draft)
        cost = generation.statistics
        return {
            "text": opening + generation.text,
            "given": opening,
            "stop_reason": generation.answer.stop_reason,
            "tokens": cost.tokens,
            "passes": cost.passes,
            "tokens_per_pass": cost.tokens_per_pass,
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""  # an absent cell of a table is NaN


def _slots(value: Any) -> dict[str, str]:
    if not _text(value).strip():
        return {}
    try:
        slots = json.loads(value)
    except ValueError:
        slots = None
    if not isinstance(slots, dict):
        raise UserError(
            "the column `slots` is not a JSON object", f"got {value[:60]!r}", 'send for example {"text": "hi"}'
        )
    return {str(name): str(text) for name, text in slots.items()}


def save_model(bundle: Path, folder: Path) -> None:
    """Write a self-contained MLflow model.

    Args:
        bundle: the bundle's folder; its path is recorded as given, so pass a relative one.
        folder: empty or absent; gets MLmodel, a copy of the bundle, this file and `components/`.
    """
    installed = package_versions(*RUNTIME_PACKAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on type hints, which this hand-written signature replaces
        mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=os.path.relpath(__file__),  # recorded as given: no machine's path goes into a model
            artifacts={ARTIFACT: str(bundle)},
            code_paths=[str(Path(components.__file__).resolve().parent)],
            pip_requirements=[f"{name}=={version}" for name, version in installed.items()],
            signature=signature(),
            model_config={"threads": 0},
        )


set_model(BundleModel())
