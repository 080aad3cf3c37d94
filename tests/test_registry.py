"""Runs and releases in a real SQLite store: nothing twice, nothing half, nothing that breaks when the project moves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from components.core.config import Registry
from components.core.errors import UserError
from components.core.files import sha256_folder
from components.release import registry as registry_module
from components.release.evidence import evidence_files, load_evidence
from components.release.gates import Decision, decide
from components.release.registry import (
    Published,
    ReleaseTags,
    candidate_version,
    load_candidate,
    point_alias,
    publish,
    set_candidate,
)
from components.release.tracking import TrackingRun, open_client
from helpers_bundle import random_head, tiny_bundle
from helpers_release import GATES, REGISTRY, write_fake_bundle, write_good_evidence

ROOT = Path(__file__).resolve().parent.parent
TAGS = ReleaseTags("abc", "d" * 64, "f" * 64, "e" * 64, "float32")
BUNDLE, REPORTS = Path("models/bundle"), Path("models/reports")
START = (
    "import sys\n"
    "from helpers_release import REGISTRY\n"
    "from components.release.tracking import TrackingRun\n"
    "run = TrackingRun.start_or_resume(REGISTRY, 'test', {'a': 1}, {'b': 'c'})\n"
    "run.log(1, {'loss': 1.0})\n"
    "print(run.run_id, flush=True)\n"
)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite store, made once: MLflow's migration takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(REGISTRY.model_copy(update={"tracking_uri": f"sqlite:///{path}"}))
    return path


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def project(empty_project: Path, empty_store: Path) -> Path:
    """A folder with an empty store."""
    (empty_project / ".mlflow").mkdir()
    shutil.copyfile(empty_store, empty_project / ".mlflow/mlflow.db")
    return empty_project


def python(script: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh process in the current folder."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def status(run_id: str) -> str:
    return str(open_client(REGISTRY).get_run(run_id).info.status)


def curve(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in open_client(REGISTRY).get_metric_history(run_id, key)]


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_without_drawing_twice(project: Path) -> None:
    first = TrackingRun.start_or_resume(REGISTRY, "train", {"lr": 0.1}, {"stage": "train"})
    for step in (1, 2):
        first.log(step, {"loss": float(step)})
    again = TrackingRun.start_or_resume(REGISTRY, "train", {"lr": 0.1}, {"stage": "train"}, first.run_id)
    assert again.run_id == first.run_id
    for step in (2, 3):
        again.log(step, {"loss": 10.0 * step})
    again.finish()
    first.finish()
    assert curve(again.run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert status(again.run_id) == "FINISHED"
    run = open_client(REGISTRY).get_run(again.run_id)
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["stage"] == "train"


@pytest.mark.parametrize("known", ["0" * 32, "finished"])
def test_a_run_that_cannot_be_resumed_gives_a_new_one(project: Path, known: str) -> None:
    old = TrackingRun.start_or_resume(REGISTRY, "train", {}, {})
    old.finish()
    new = TrackingRun.start_or_resume(REGISTRY, "train", {}, {}, old.run_id if known == "finished" else known)
    assert new.run_id not in (old.run_id, known)
    new.finish()


def test_an_exception_fails_the_run_and_comes_through(project: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        TrackingRun.start_or_resume(REGISTRY, "train", {}, {}) as run,
    ):
        run.log(1, {"loss": 1 / 0})
    assert status(run.run_id) == "FAILED"


def test_a_process_that_just_ends_fails_its_run(project: Path) -> None:
    output, errors = python(START + "sys.exit(0)").communicate()
    assert status(output.strip()) == "FAILED", errors


def test_a_killed_run_is_never_finished_and_can_be_resumed(project: Path) -> None:
    process = python(START + "sys.stdin.read()")
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert status(run_id) == "RUNNING"
    run = TrackingRun.start_or_resume(REGISTRY, "test", {"a": 1}, {}, run_id)
    assert run.run_id == run_id
    run.log(2, {"loss": 0.5})
    run.finish()
    assert curve(run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_a_store_whose_making_was_killed_is_made_anew(empty_project: Path) -> None:
    """MLflow's migration stands on tables that it half made; the statement chosen here made it fail for good."""
    kill = (
        "import os\n"
        "from sqlalchemy import event\n"
        "from sqlalchemy.engine import Engine\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if 'DROP INDEX index_spans_experiment_id' in statement: os.kill(os.getpid(), 9)\n"
        "event.listen(Engine, 'after_cursor_execute', kill)\n"
    )
    process = python(kill + START)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    open_client(REGISTRY)
    assert sorted(path.name for path in Path(".mlflow").iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_processes_that_start_at_once_share_one_new_store(empty_project: Path) -> None:
    processes = [python(START + "run.finish()") for _ in range(3)]
    ends = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ends
    assert {status(output.strip()) for output, _ in ends} == {"FINISHED"}
    assert len({open_client(REGISTRY).get_run(output.strip()).info.experiment_id for output, _ in ends}) == 1


@pytest.mark.parametrize("address", ["", "mlruns", "sqlite://", "ftp://host", "http://127.0.0.1:9"])
def test_a_store_that_is_not_there_gives_three_lines(
    empty_project: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    registry = Registry(tracking_uri=address, artifact_root=".a", experiment="e", model_name="m")
    with pytest.raises(UserError) as caught:
        TrackingRun.start_or_resume(registry, "train", {}, {})
    assert len(caught.value.render().splitlines()) == 3
    assert not list(empty_project.iterdir())


# --- releases -----------------------------------------------------------------------------------------------------


def decision_about(bundle: Path = BUNDLE) -> Decision:
    write_good_evidence(Path(), bundle)
    return decide(load_evidence(REPORTS, bundle), GATES)


def publish_now(decision: Decision, bundle: Path = BUNDLE) -> Published:
    files = evidence_files(load_evidence(REPORTS, bundle))
    return publish(bundle, REPORTS, files, decision, REGISTRY, TAGS)


def versions() -> list[int]:
    found = open_client(REGISTRY).search_model_versions(f"name = '{REGISTRY.model_name}'")
    return sorted(int(version.version) for version in found)


def test_the_same_bytes_make_one_version_and_the_second_time_changes_nothing(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    decision = decision_about()
    first = publish_now(decision)
    assert first.created
    assert set_candidate(REGISTRY, first, decision)
    files = sha256_folder(project / ".mlflow/artifacts")
    second = publish_now(decision)
    assert second == replace(first, created=False)
    assert not set_candidate(REGISTRY, second, decision)
    assert versions() == [1]
    assert sha256_folder(project / ".mlflow/artifacts") == files
    assert not list((project / ".work").iterdir()), "scratch folders are gone"


def test_a_version_tells_where_it_comes_from_and_keeps_its_evidence(project: Path) -> None:
    digest = write_fake_bundle(BUNDLE)
    decision = decision_about()
    published = publish_now(decision)
    version = open_client(REGISTRY).get_model_version(published.name, str(published.version))
    assert version.tags == {
        "git_sha": "abc",
        "data_sha256": "d" * 64,
        "backbone_sha256": "f" * 64,
        "head_sha256": "e" * 64,
        "precision": "float32",
        "bundle_sha256": digest,
        "gate_passed": "true",
    }
    assert not Path(version.source).is_absolute()
    kept = Path(version.source) / "evidence"
    for name in ("verification.json", "benchmark/local.json", "contracts/prompts.json"):
        assert (kept / name).read_bytes() == (REPORTS / name).read_bytes()


def test_newer_evidence_replaces_older_beside_the_same_version(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    published = publish_now(decision_about())
    slow = json.loads((REPORTS / "benchmark/local.json").read_text())
    slow["overall"]["speedup"] = 0.5
    (REPORTS / "benchmark/local.json").write_text(json.dumps(slow))
    decision = decide(load_evidence(REPORTS, BUNDLE), GATES)
    again = publish_now(decision)
    version = open_client(REGISTRY).get_model_version(again.name, str(again.version))
    assert again.version == published.version
    assert version.tags["gate_passed"] == "false"
    assert json.loads((Path(version.source) / "evidence/benchmark/local.json").read_text()) == slow


def test_other_bytes_make_another_version_and_the_alias_moves(project: Path) -> None:
    versions_seen = []
    for content in (b"one", b"two"):
        write_fake_bundle(BUNDLE, content)
        decision = decision_about()
        published = publish_now(decision)
        assert set_candidate(REGISTRY, published, decision)
        versions_seen.append(candidate_version(REGISTRY))
    assert versions_seen == [1, 2]
    point_alias(REGISTRY, 1)
    assert candidate_version(REGISTRY) == 1
    point_alias(REGISTRY, None)
    assert candidate_version(REGISTRY) is None


def test_a_refused_bundle_never_becomes_candidate(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    decision = replace(decision_about(), passed=False)
    published = publish_now(decision)
    with pytest.raises(UserError, match="refused"):
        set_candidate(REGISTRY, published, decision)
    assert candidate_version(REGISTRY) is None


def test_a_decision_about_other_bytes_moves_and_publishes_nothing(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    decision = decision_about()
    published = publish_now(decision)
    other = replace(decision, bundle_sha256="0" * 64)
    with pytest.raises(UserError, match="another bundle"):
        set_candidate(REGISTRY, published, other)
    with pytest.raises(UserError, match="another bundle"):
        publish_now(other)
    assert candidate_version(REGISTRY) is None


def test_a_damaged_bundle_is_not_published(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    decision = decision_about()
    (BUNDLE / "backbone.onnx").write_bytes(b"rotten")
    with pytest.raises(UserError, match="differs from the bundle's manifest"):
        publish_now(decision)
    assert versions() == []


def test_a_publication_killed_half_way_is_completed_by_the_next(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_bundle(BUNDLE)
    decision = decision_about()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registry_module, "_create_version", die)
        publish_now(decision)
    assert versions() == []
    assert publish_now(decision).created
    assert versions() == [1]


def test_no_candidate_gives_three_lines(project: Path) -> None:
    with pytest.raises(UserError, match="mtp release"):
        load_candidate(REGISTRY)


def test_loading_where_no_store_is_makes_none(empty_project: Path) -> None:
    with pytest.raises(UserError, match="no MLflow store"):
        load_candidate(REGISTRY)
    assert not list(empty_project.iterdir())


def test_a_candidate_whose_files_are_gone_gives_three_lines(project: Path) -> None:
    write_fake_bundle(BUNDLE)
    decision = decision_about()
    set_candidate(REGISTRY, publish_now(decision), decision)
    shutil.rmtree(project / ".mlflow/artifacts")
    with pytest.raises(UserError, match=f"no .*{decision.bundle_sha256}/MLmodel"):
        load_candidate(REGISTRY)


def test_an_answer_of_the_model_begins_with_what_it_was_given(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    import pandas as pd

    from components.core.manifest import TaskPrompt
    from components.modeling.backbone import load_backbone
    from components.onnx.runtime import open_bundle
    from components.release.model import BundleModel, signature

    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(tmp_path / "bundle", tiny_backbone_dir, backbone, random_head(backbone))
    model = BundleModel()
    model.bundle = open_bundle(tmp_path / "bundle", 1)
    task = TaskPrompt(rendered="{text}\nDear {me}", answer_prefix="Dear {me}", stop_texts=(), max_new_tokens=6)
    model.bundle.manifest = model.bundle.manifest.model_copy(update={"tasks": {"letter": task}})
    answers = model.predict(None, pd.DataFrame([{"task": "letter", "text": "hi"}]))
    alone = model.bundle.complete("letter", {"text": "hi", "me": "Alex"})
    assert list(answers.columns) == signature().outputs.input_names()
    assert (answers["given"][0], answers["text"][0]) == ("Dear Alex", f"Dear Alex{alone.text}")
    assert answers["tokens"][0] == alone.statistics.tokens


ASK = (
    "import json, os, sys, mlflow, pandas as pd\n"
    "model = mlflow.pyfunc.load_model('models:/tiny-mtp@candidate')\n"
    "table = pd.DataFrame([{'task': 'proofread', 'text': 'i has went'},"
    " {'task': 'proofread', 'slots': '{\"text\": \"i has went\"}'}])\n"
    "store = 'sqlite:///' + os.path.abspath('.mlflow/mlflow.db')\n"
    "rows = [model.predict(table, params={'draft': draft}).to_dict('records') for draft in (True, False)]\n"
    "from components.core.config import Registry\n"
    "from components.release.registry import load_candidate\n"
    "os.chdir('..')\n"
    "names = {'artifact_root': 'x', 'experiment': 'x', 'model_name': 'tiny-mtp'}\n"
    "far = load_candidate(Registry(tracking_uri=store, **names)).predict(table).to_dict('records')\n"
    "print(json.dumps({'rows': rows, 'far': far, 'from': sys.modules['components'].__file__}))\n"
)


def test_a_real_bundle_answers_by_alias_after_the_project_has_moved_and_from_another_folder(
    project: Path, tiny_backbone_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.modeling.backbone import load_backbone

    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(BUNDLE, tiny_backbone_dir, backbone, random_head(backbone))
    decision = decision_about()
    set_candidate(REGISTRY, publish_now(decision), decision)
    moved = tmp_path / "elsewhere"
    shutil.move(project, moved)
    monkeypatch.chdir(moved)
    shutil.rmtree(BUNDLE)
    process = python(ASK, MLFLOW_TRACKING_URI=REGISTRY.tracking_uri, PYTHONPATH="")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    answer = json.loads(output.splitlines()[-1])
    drafted, plain = answer["rows"]
    assert Path(answer["from"]).is_relative_to(moved), "the model brings its own code"
    assert [row["text"] for row in drafted] == [row["text"] for row in plain]
    assert drafted[0] == drafted[1]
    assert answer["far"] == drafted
    assert 0 < drafted[0]["tokens"] <= 12
    assert plain[0]["tokens_per_pass"] == 1.0
    assert plain[0]["given"] == ""
    assert not list(moved.rglob("*.pkl"))
    assert str(project) not in (moved / ".mlflow/artifacts/models" / decision.bundle_sha256 / "MLmodel").read_text()
