"""The gates refuse for every reason there is, say which, and never crash on bad evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core import paths
from components.core.manifest import bundle_hash
from components.release.evidence import Evidence, Source, load_evidence
from components.release.gates import Decision, decide
from helpers_release import FROZEN, GATES, MADE, PLACES, TASKS, good_documents, write_documents, write_fake_bundle
from pipelines.report import decision_table
from pipelines.stages import gate as gate_stage

BUNDLE = "b" * 64
MANIFEST = {
    "backbone": {"weights_sha256": FROZEN},
    "tasks": {name: {} for name in TASKS},
    "policies": {"modes": {"head": {}}},
}


def evidence(documents: dict[str, Any], manifest: Any = MANIFEST) -> Evidence:
    sources = {name: Source(name, "0" * 64, document) for name, document in documents.items()}
    return Evidence(manifest=Source("manifest.json", BUNDLE, manifest), **sources)


def refused(change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Names of the rules that fail after ``change`` to good evidence."""
    documents = good_documents(BUNDLE)
    change(documents)
    decision = decide(evidence(documents), GATES)
    assert decision.passed == (not decision.refusals)
    assert all(rule.reason for rule in decision.refusals)
    return [rule.rule for rule in decision.refusals]


def put(document: str, *keys: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    """A change of one value; ``None`` as value removes the key."""

    def change(documents: dict[str, Any]) -> None:
        place = documents[document]
        for key in keys[:-1]:
            place = place[key]
        if value is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value

    return change


def test_good_evidence_passes_and_names_its_bundle() -> None:
    decision = decide(evidence(good_documents(BUNDLE)), GATES)
    assert decision.passed
    assert decision.bundle_sha256 == BUNDLE
    assert all(rule.source_sha256 for rule in decision.rules)


FAULTS = [
    ("exact match, every mode", put("verification", "modes", "head", "overall", "exact_match", value=0.99)),
    ("exact match, every mode", put("verification", "modes", value={})),
    ("exact match, every mode", put("verification", "modes", "surplus", value={})),
    ("exact match, every mode", put("verification", "modes", "head", "overall", "prompts", value=0)),
    ("exact match, every mode", put("verification", "modes", "head", "overall", "mismatches", value=[{"position": 1}])),
    ("head extra tokens per pass, overall", put("verification", "overall", "head_extra_tokens_per_pass", value=0.03)),
    ("backbone after training", put("training", "backbone_sha256_after", value="0" * 64)),
    ("backbone before training", put("training", "backbone_sha256_before", value="0" * 64)),
    ("data contract of prompts", put("prompts", "passed", value=False)),
    ("data contract of distilled", put("distilled", "expectations", 0, "passed", value=False)),
    ("data contract of prompts", put("prompts", "rows", value=0)),
    ("data contract of prompts", put("prompts", "expectations", value=[])),
    ("bundle equals torch", put("export", "parity", "passed", value=False)),
    ("bundle equals torch", put("export", "parity", "passed", value="yes")),
    ("export is about this bundle", put("export", "bundle_sha256", value="c" * 64)),
    ("verification is about this bundle", put("verification", "bundle_sha256", value="c" * 64)),
    ("benchmark is about this bundle", put("benchmark", "bundle_sha256", value=None)),
    ("exact match, proofread", put("verification", "tasks", 0, "exact_match", value=0.99)),
    ("exact match, proofread", put("verification", "tasks", 0, "exact_match", value=math.nan)),
    ("exact match, proofread", put("verification", "tasks", 0, "mismatches", value=[{"position": 1}])),
    ("extra tokens per pass, overall", put("verification", "overall", "extra_tokens_per_pass", value=0.89)),
    ("extra tokens per pass, overall", put("verification", "overall", "extra_tokens_per_pass", value=None)),
    ("extra tokens per pass, smart_reply", put("verification", "tasks", 1, "extra_tokens_per_pass", value=0.59)),
    ("extra tokens per pass, smart_reply", put("verification", "tasks", 1, "extra_tokens_per_pass", value=True)),
    ("speedup, overall", put("benchmark", "overall", "speedup", value=1.19)),
    ("speedup, overall", put("benchmark", "overall", "speedup", value=math.inf)),
    ("speedup, smart_reply", put("benchmark", "tasks", 1, "speedup", value=0.99)),
    ("speedup, smart_reply", put("benchmark", "tasks", 1, "prompts", value=0)),
    ("timed answers equal greedy", put("benchmark", "overall", "mismatches", value=[{"mode": "mtp"}])),
    ("exactness and speed in one numeric mode", put("benchmark", "created_with", value={**MADE, "cpu": "other"})),
    ("exactness and speed in one numeric mode", put("benchmark", "created_with", value={**MADE, "threads": 2})),
    ("exactness and speed in one numeric mode", put("verification", "created_with", value=None)),
]


@pytest.mark.parametrize(("rule", "fault"), FAULTS)
def test_each_fault_is_refused_by_its_rule_alone(rule: str, fault: Callable[[dict[str, Any]], object]) -> None:
    assert refused(fault) == [rule]


@pytest.mark.parametrize("name", ["evaluation", "verification", "benchmark"])
def test_a_task_missing_from_evidence_is_refused(name: str) -> None:
    assert f"{name} covers the bundle's tasks" in refused(lambda documents: documents[name]["tasks"].pop())


def test_a_task_that_the_bundle_lacks_is_judged_too() -> None:
    def add(documents: dict[str, Any]) -> None:
        documents["verification"]["tasks"].append({"task": "surplus", "prompts": 1, "exact_match": 0.0})

    assert {"verification covers the bundle's tasks", "exact match, surplus"} <= set(refused(add))


def test_two_rows_of_one_task_are_refused() -> None:
    def double(documents: dict[str, Any]) -> None:
        documents["benchmark"]["tasks"].append(documents["benchmark"]["tasks"][0])

    assert "speedup, proofread" in refused(double)


@pytest.mark.parametrize("name", list(PLACES))
def test_a_missing_or_broken_file_blocks_with_its_name(name: str, tmp_path: Path) -> None:
    digest = write_fake_bundle(tmp_path / "bundle")
    for text in (None, "", "[1,", "[]", "null", '"text"', "7"):
        write_documents(tmp_path, good_documents(digest))
        path = tmp_path / PLACES[name]
        path.unlink() if text is None else path.write_text(text)
        decision = decide(load_evidence(tmp_path, tmp_path / "bundle"), GATES)
        assert not decision.passed
        assert any(PLACES[name] in rule.reason for rule in decision.refusals)


def test_no_evidence_at_all_blocks(tmp_path: Path) -> None:
    decision = decide(load_evidence(tmp_path, tmp_path / "bundle"), GATES)
    assert not decision.passed
    assert decision.bundle_sha256 == ""
    assert not any(rule.passed for rule in decision.rules)


def test_evidence_read_from_files_passes(tmp_path: Path) -> None:
    digest = write_fake_bundle(tmp_path / "bundle")
    write_documents(tmp_path, good_documents(digest))
    decision = decide(load_evidence(tmp_path, tmp_path / "bundle"), GATES)
    assert decision.passed, decision.refusals
    assert decision.bundle_sha256 == bundle_hash(tmp_path / "bundle")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tasks", "overall", "task"]), inner),
    max_leaves=8,
)


@given(name=st.sampled_from(list(PLACES)), document=JSON_VALUES)
def test_nonsense_never_passes_and_never_crashes(name: str, document: Any) -> None:
    decision = decide(evidence(good_documents(BUNDLE) | {name: document}), GATES)
    assert not decision.passed


@given(document=JSON_VALUES)
def test_a_nonsense_manifest_never_passes_and_never_crashes(document: Any) -> None:
    assert not decide(evidence(good_documents(BUNDLE), document), GATES).passed


def run_stage(project: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    root = Path(__file__).resolve().parent.parent
    for name in ("params.yaml", "dvc.yaml"):
        (project / name).write_text((root / name).read_text())
    monkeypatch.chdir(project)
    gate_stage.main()
    document: dict[str, Any] = json.loads((project / paths.GATE_REPORT).read_text())
    return document


def test_the_stage_writes_a_refusal_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = run_stage(tmp_path, monkeypatch)
    assert document["passed"] is False
    assert {"rule", "value", "bound", "passed", "source", "source_sha256"} <= set(document["rules"][0])


def test_the_stage_writes_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = write_fake_bundle(tmp_path / paths.BUNDLE)
    write_documents(tmp_path / paths.REPORTS, good_documents(digest))
    document = run_stage(tmp_path, monkeypatch)
    assert document["passed"] is True
    assert document["bundle_sha256"] == digest
    assert document["created_with"]["python"]


def test_the_table_shows_every_rule_and_every_reason() -> None:
    documents = good_documents(BUNDLE)
    documents["benchmark"]["tasks"][1]["speedup"] = 0.5
    decision: Decision = decide(evidence(documents), GATES)
    text = "\n".join(decision_table(decision))
    assert all(rule.rule in text for rule in decision.rules)
    assert "0.5 does not meet 1.0" in text
