"""Evidence, bundles and registries for the tests of gates, registry, flows and command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.core.config import Gates, Registry
from components.core.files import sha256_file
from components.core.manifest import (
    BackboneCard,
    Contract,
    DraftPolicy,
    Graph,
    HeadCard,
    Manifest,
    Policies,
    TaskPrompt,
    bundle_hash,
    read_manifest,
    write_manifest,
)

GATES = Gates(
    exact_match=1.0,
    extra_tokens_per_pass_overall=0.9,
    extra_tokens_per_pass_task=0.6,
    speedup_overall=1.2,
    speedup_task=1.0,
)
REGISTRY = Registry(
    tracking_uri="sqlite:///.mlflow/mlflow.db",
    artifact_root=".mlflow/artifacts",
    experiment="tests",
    model_name="tiny-mtp",
)
MADE = {"cpu": "a test", "threads": 1, "precision": "float32", "packages": {"onnxruntime": "1.32.0"}}
FROZEN = "f" * 64
PLACES = {
    "prompts": "contracts/prompts.json",
    "distilled": "contracts/distilled.json",
    "training": "training.json",
    "evaluation": "evaluation.json",
    "export": "export.json",
    "verification": "verification.json",
    "benchmark": "benchmark/local.json",
}
TASKS = {
    "proofread": TaskPrompt(rendered="Correct: {text}", stop_texts=(), max_new_tokens=8),
    "smart_reply": TaskPrompt(rendered="You are {me}: {text}", stop_texts=(), max_new_tokens=8),
}


def write_fake_bundle(folder: Path, content: bytes = b"weights", tasks: Mapping[str, TaskPrompt] = TASKS) -> str:
    """A folder with a valid manifest and one file, which cannot decode; returns its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backbone.onnx").write_bytes(content)
    graph = Graph(file="backbone.onnx", opset=21, ir_version=10, inputs=(), outputs=())
    manifest = Manifest(
        name="fake",
        precision="float32",
        max_length=64,
        contract=Contract(kv_layers=(1,), embedding_scale=1.0),
        policies=Policies(modes={"head": DraftPolicy(longest=3, stop_below=0.0, lookup_ngram=0)}, default="head"),
        backbone=BackboneCard(
            source="path:tests",
            weights_sha256=FROZEN,
            model_type="llama",
            layers=4,
            hidden_size=64,
            query_heads=4,
            kv_heads=2,
            head_dim=16,
            vocab_size=320,
            eos_ids=(2,),
        ),
        head=HeadCard(weights_sha256="e" * 64, parameters=1, draft_vocabulary_size=10),
        graphs={"backbone": graph, "head": graph},
        tasks=dict(tasks),
        versions={},
        files={"backbone.onnx": sha256_file(folder / "backbone.onnx")},
    )
    write_manifest(folder, manifest)
    return bundle_hash(folder)


def good_documents(
    bundle: str, frozen: str = FROZEN, tasks: tuple[str, ...] = tuple(TASKS), modes: tuple[str, ...] = ("head",)
) -> dict[str, Any]:
    """Evidence that passes every gate, by name."""
    exact = {"prompts": 5, "tokens": 60, "exact_match": 1.0, "mismatches": [], "acceptance_length": 2.0}
    exact |= {
        "extra_tokens_per_pass": 1.0,
        "head_extra_tokens_per_pass": 1.0,
        "conditional_acceptance": [0.6, 0.5, 0.4],
    }
    fast = {
        "prompts": 3,
        "repeats": 2,
        "speedup": 1.4,
        "mismatches": [],
        "greedy_tokens_per_s": 10.0,
        "mtp_tokens_per_s": 14.0,
    }
    fast |= {"echo_rate": 0.25, "prompt_lookup_acceptance_length": 1.5}
    contract = {
        "created_with": MADE,
        "suite": "a suite",
        "passed": True,
        "rows": 9,
        "expectations": [{"expectation": "not null", "column": "task", "passed": True, "observed": 0}],
    }

    def figures(row: dict[str, Any]) -> dict[str, Any]:
        rows = [{"task": task, **copy.deepcopy(row)} for task in tasks]
        return {"created_with": dict(MADE), "bundle_sha256": bundle, "tasks": rows, "overall": copy.deepcopy(row)}

    by_mode = {"modes": {mode: {"overall": copy.deepcopy(exact)} for mode in modes}}
    return {
        "prompts": copy.deepcopy(contract),
        "distilled": copy.deepcopy(contract),
        "training": {"created_with": MADE, "backbone_sha256_before": frozen, "backbone_sha256_after": frozen},
        "evaluation": figures(exact),
        "export": {"created_with": MADE, "bundle_sha256": bundle, "parity": {"passed": True}},
        "verification": figures(exact) | by_mode,
        "benchmark": figures(fast),
    }


def write_documents(reports: Path, documents: Mapping[str, Any]) -> None:
    """Write evidence where the stages write it; NaN is allowed, as a careless writer would."""
    for name, document in documents.items():
        path = reports / PLACES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document), encoding="utf-8")


def write_good_evidence(project: Path, bundle: Path) -> str:
    """Passing evidence about ``bundle`` below ``project``/models/reports; returns the bundle's hash."""
    manifest, digest = read_manifest(bundle), bundle_hash(bundle)
    documents = good_documents(
        digest, manifest.backbone.weights_sha256, tuple(manifest.tasks), tuple(manifest.policies.modes)
    )
    write_documents(project / "models/reports", documents)
    return digest
