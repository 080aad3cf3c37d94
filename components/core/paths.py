"""Where everything lies, relative to the project's root. DVC's dvc.yaml names the same paths; a test compares them."""

from __future__ import annotations

from pathlib import Path

from components.core.errors import UserError

RAW = Path("data/raw")
RAW_CHAT = RAW / "chat.json"
RAW_MISSPELLINGS = RAW / "misspellings.txt"
PROMPTS = Path("data/prompts/prompts.parquet")
TEMPLATES = Path("data/prompts/templates.json")
DISTILLED = Path("data/distilled")
ANSWERS = DISTILLED / "answers.parquet"
FEATURES = DISTILLED / "features"

BACKBONE = Path("models/backbone")
HEAD = Path("models/head")
POLICY = Path("models/policy.json")
BUNDLE = Path("models/bundle")

REPORTS = Path("models/reports")
CONTRACTS = REPORTS / "contracts"
DATA_DOCS = REPORTS / "data_docs"
DISTILLATION_REPORT = REPORTS / "distillation.json"
TRAINING_REPORT = REPORTS / "training.json"
EVALUATION_REPORT = REPORTS / "evaluation.json"
EXPORT_REPORT = REPORTS / "export.json"
VERIFICATION_REPORT = REPORTS / "verification.json"
BENCHMARK_REPORT = REPORTS / "benchmark" / "local.json"
COMPARISON_REPORT = REPORTS / "comparison.json"
STUDY_REPORT = REPORTS / "study.json"
THROUGHPUT_REPORT = REPORTS / "throughput.json"
GATE_REPORT = REPORTS / "gate.json"
OWN_TEXTS = REPORTS / "own_texts"  # what people evaluate by hand; no stage reads or writes it

WORK = Path(".work")  # half-finished work that a killed stage picks up again; never a DVC output


def check_project(folder: Path = Path()) -> None:
    """Check that ``folder`` is a project's root, before anything in it is missed.

    Raises:
        UserError: it holds no params.yaml.
    """
    if (folder / "params.yaml").is_file():
        return
    lost = (folder / "dvc.yaml").is_file()
    remedy = "`git checkout params.yaml`" if lost else "cd to the project's folder, then type the same command again"
    raise UserError("this is no project folder", f"no params.yaml in {folder.resolve()}", remedy)
