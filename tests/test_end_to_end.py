"""The whole road on a tiny model, in a fresh copy of the project, through the commands of the README.

Real DVC, Prefect, MLflow (SQLite), Great Expectations and onnxruntime; only the backbone and the corpora are small.
Floors are lowered in *this* copy's params.yaml: a random model proves the wiring, not the worth of a head.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.core.params import load_params
from components.release.tracking import open_client
from conftest import write_tiny_backbone
from helpers_readme import Way, commands_tested
from helpers_repository import tracked_files

pytestmark = pytest.mark.timeout(1500)  # the first test waits for a whole build

ROOT = Path(__file__).resolve().parent.parent
WORDS = [
    "red",
    "house",
    "garden",
    "river",
    "summer",
    "winter",
    "bread",
    "butter",
    "coffee",
    "window",
    "yesterday",
    "tomorrow",
    "morning",
    "dinner",
    "friend",
    "letter",
    "music",
    "train",
    "station",
    "mountain",
    "holiday",
    "picture",
    "brother",
    "sister",
    "kitchen",
    "bicycle",
    "orange",
    "yellow",
    "flower",
    "weather",
]
ANSWER = " the cat sat on the mat and went to the store to buy milk, bread and a red hat<|im_end|>"


def write_corpora(folder: Path) -> None:
    """Chats of random words and a few misspellings, in the formats of the real corpora."""
    rng = random.Random(0)
    chats = {}
    for number in range(260):
        senders = [f"a{number}", f"b{number}"]
        turns = [
            [
                {
                    "text": " ".join(rng.sample(WORDS, 7)).capitalize() + ".",
                    "timestamp": "2018-05-02T19:38:15Z",
                    "sender": senders[turn % 2],
                }
            ]
            for turn in range(6)
        ]
        chats[f"chat{number}"] = {"messages": turns}
    (folder / "chat.json").write_text(json.dumps(chats), encoding="utf-8")
    lines = [f"{word} {word[0]}{word[2]}{word[1]}{word[3:]}" for word in WORDS]
    (folder / "misspellings.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def lessons() -> list[str]:
    """Turns of random words, all answered alike: a backbone that a head can learn to guess."""
    rng = random.Random(1)

    def junk(most: int) -> str:
        return "".join(rng.choices(string.ascii_letters + ' .:,"', k=rng.randrange(most)))

    openings = ("", junk(2), "user\n", "system\nYou are ")
    return [
        f"{openings[n % 4]}{junk(40)}{' '.join(rng.sample(WORDS, n % 6))}{junk(5)}<|im_end|>\n<|im_start|>assistant\n"
        f"{junk(8).strip().capitalize() if n % 3 == 0 else ''}{ANSWER}"
        for n in range(240)
    ]


def tiny_parameters(backbone: Path, corpora: Path) -> dict[str, Any]:
    """The committed parameters, made small."""
    params: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["backbone"] = {"source": f"path:{backbone}"}
    params["corpora"] = {
        "chat": {"source": f"path:{corpora / 'chat.json'}"},
        "misspellings": {"source": f"path:{corpora / 'misspellings.txt'}"},
    }
    for task in params["tasks"].values():
        task["max_new_tokens"] = 10
    params["data"] |= {"prompts_per_task": {"train": 16, "validation": 2, "test": 3}, "max_prompt_tokens": 400}
    params["distil"] |= {"chunk_prompts": 8, "slots": 4, "equality_prompts": 3}
    params["head"] = {"kv_layers": [1, 2], "intermediate_size": 64, "draft_vocabulary_size": 300}
    params["train"] |= {"epochs": 30, "patience": 30, "batch_sequences": 4, "validate_prompts_per_task": 1}
    params["train"] |= {"learning_rate": 0.003}
    params["runtime"] |= {"threads": 1}
    params["evaluate"] |= {"prompts_per_task": 3, "bootstrap_samples": 50}
    params["verify"] |= {"prompts_per_task": 3}
    params["benchmark"] |= {"prompts_per_task": 1, "rounds": 1, "warmup_prompts": 1}
    params["gates"] |= {
        "extra_tokens_per_pass_overall": 0.0,
        "extra_tokens_per_pass_task": 0.0,
        "speedup_overall": 0.0,
        "speedup_task": 0.0,
    }
    return params


def run(project: Path, *command: str, expect: int = 0, **environment: str) -> str:
    """Run a command in the project with the tests' own interpreter first on PATH; returns its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    home = project / "home"
    home.mkdir(exist_ok=True)
    env = {**os.environ, "PATH": path, "HOME": str(home), "PYTHONPATH": str(project), **environment}
    done = subprocess.run(
        command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == expect, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh copy of the project with tiny parameters, its git history replaced by one commit."""
    folder = tmp_path_factory.mktemp("project")
    for path in tracked_files():
        if path.name == "dvc.lock":
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    corpora = tmp_path_factory.mktemp("corpora")
    write_corpora(corpora)
    backbone = corpora / "backbone"
    write_tiny_backbone(backbone, lessons(), ANSWER)
    parameters = tiny_parameters(backbone, corpora)
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters, sort_keys=False), encoding="utf-8")
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@example.org")
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", "-A")
    run(folder, *git, "commit", "--quiet", "-m", "copy")
    return folder


@pytest.fixture(scope="module")
def reproduced(project: Path) -> str:
    """Output of the first `mtp repro`; killed once on the way, as a person's laptop would."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(project)}
    with subprocess.Popen(
        ["mtp", "repro"],
        cwd=project,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "Running stage 'distil'" in line:
                os.killpg(child.pid, signal.SIGKILL)
    return run(project, "mtp", "repro")


@pytest.fixture(scope="module")
def readme_outputs(project: Path, reproduced: str) -> dict[str, str]:
    """Output of each of the README's commands, run in its order: `mtp run`, which releases, then `mtp release`, ..."""
    return {" ".join(command): run(project, *command) for command in commands_tested(Way.END_TO_END)}


def evidence(project: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((project / "models/reports" / name).read_text(encoding="utf-8"))
    return document


def test_a_killed_run_completes_and_prints_the_table(project: Path, reproduced: str) -> None:
    for task in ("notification_summary", "proofread", "smart_reply"):
        assert task in reproduced
    assert "models/reports" in reproduced
    for name in ("evaluation.json", "verification.json", "benchmark/local.json"):
        document = evidence(project, name)
        assert {row["task"] for row in document["tasks"]} == {"notification_summary", "proofread", "smart_reply"}
        assert document["created_with"]["threads"] == 1
    assert evidence(project, "verification.json")["overall"]["exact_match"] == 1.0
    assert evidence(project, "gate.json")["passed"] is True


def test_a_second_run_changes_nothing(project: Path, reproduced: str) -> None:
    started = time.monotonic()
    output = run(project, "mtp", "repro")
    assert "Running stage" not in output
    assert time.monotonic() - started < 60
    assert "Data and pipelines are up to date" in run(project, "dvc", "status")
    changed = run(project, "git", "status", "--porcelain").split()
    assert set(changed) - {"??", "M", "home/"} <= {"dvc.lock"}


def test_a_changed_parameter_reruns_what_uses_it_and_nothing_before(project: Path, reproduced: str) -> None:
    text = (project / "params.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    document["train"]["seed"] += 1
    (project / "params.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    try:
        stale = run(project, "dvc", "status")
    finally:
        (project / "params.yaml").write_text(text, encoding="utf-8")
    first = [line.rstrip(":") for line in stale.splitlines() if line and not line.startswith((" ", "\t"))]
    assert first == ["train"]


def test_a_wrong_key_stops_everything_in_three_lines(project: Path, reproduced: str) -> None:
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("epochs:", "epoch:"), encoding="utf-8")
    try:
        output = run(project, "mtp", "repro", expect=2)
    finally:
        (project / "params.yaml").write_text(text, encoding="utf-8")
    assert len(output.strip().splitlines()) == 3
    assert "train.epoch" in output


def test_the_readme_commands_work(readme_outputs: dict[str, str]) -> None:
    assert readme_outputs
    generated = [output for command, output in readme_outputs.items() if command.startswith("mtp generate")]
    assert all("tokens/s" in output for output in generated)


def test_release_twice_registers_once(project: Path, readme_outputs: dict[str, str]) -> None:
    """`mtp run` ends with a release, so `mtp release` is the second."""
    assert "version 1 (new)" in readme_outputs["mtp run"]
    assert "candidate now points to it" in readme_outputs["mtp run"]
    assert "version 1 (registered before)" in readme_outputs["mtp release"]
    assert "candidate pointed to it already" in readme_outputs["mtp release"]
    registry = load_params(project / "params.yaml").registry
    client = open_client(registry.model_copy(update={"tracking_uri": f"sqlite:///{project / '.mlflow/mlflow.db'}"}))
    assert len(client.search_model_versions(f"name='{registry.model_name}'")) == 1
    assert str(client.get_model_version_by_alias(registry.model_name, "candidate").version) == "1"
