"""Flow `release`: gates -> publish -> alias `candidate` -> smoke test by a fresh load.

Owns the order and the way back: whatever fails, `candidate` points afterwards where it pointed before. It refuses a
gate.json that does not match the evidence as it lies there now. Its surprising decision: the gates are decided again
here, from the files, so that no stale verdict can release anything.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from components.core import paths
from components.core.config import Registry
from components.core.errors import UserError
from components.core.files import read_json, sha256_file
from components.core.manifest import read_manifest
from components.core.params import load_params
from components.release import registry as registry_module
from components.release.evidence import evidence_files, load_evidence
from components.release.gates import Decision, decide
from components.release.registry import Published, ReleaseTags
from pipelines.flows.build import say
from pipelines.flows.steps import StepFailed, completed, fails_quietly
from pipelines.repro import Ended, child_environment

SMOKE = "pipelines.flows.smoke"


@task(cache_policy=NO_CACHE, persist_result=False)
@fails_quietly
def check_gates() -> Decision:
    """Decide anew.

    Raises:
        UserError: the release is refused, or gate.json says something else.
    """
    decision = decide(load_evidence(), load_params().gates)
    if not decision.passed:
        reasons = "; ".join(rule.reason for rule in decision.refusals[:3])
        what = f"the gates refuse this release ({len(decision.refusals)} of {len(decision.rules)} rules)"
        raise UserError(what, reasons, "see `mtp gate`; mend the cause, then `mtp repro`")
    written = read_json(paths.GATE_REPORT, "run `mtp repro gate`")
    if written.get("passed") is not True or written.get("bundle_sha256") != decision.bundle_sha256:
        raise UserError(f"{paths.GATE_REPORT} is out of date", "it is about other evidence", "run `mtp repro gate`")
    return decision


@task(cache_policy=NO_CACHE, persist_result=False)
@fails_quietly
def publish(registry: Registry, decision: Decision) -> Published:
    """Register the bundle with its evidence; changes nothing when it is registered already."""
    files = [*evidence_files(load_evidence()), paths.GATE_REPORT.as_posix()]
    return registry_module.publish(paths.BUNDLE, paths.REPORTS, files, decision, registry, release_tags())


@task(cache_policy=NO_CACHE, persist_result=False)
@fails_quietly
def move_candidate(registry: Registry, published: Published, decision: Decision) -> bool:
    """Let `candidate` point to the published version; False when it did already."""
    return registry_module.set_candidate(registry, published, decision)


@task(cache_policy=NO_CACHE, persist_result=False)
@fails_quietly
def smoke_test(published: Published) -> str:
    """Load `candidate` in a fresh process and let it answer; returns what that process said.

    Raises:
        UserError: it did not load, is another bundle, or did not answer.
    """
    command = [sys.executable, "-m", SMOKE, published.bundle_sha256]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Ended(done.returncode, done.stdout + done.stderr).fault("the smoke test")
    return done.stdout.strip()


@flow(name="release", persist_result=False)
@fails_quietly
def release() -> Any:
    """All four steps; on any failure the alias is put back."""
    registry = load_params().registry
    before = registry_module.candidate_version(registry)
    published: Published | None = None
    try:
        decision = completed(check_gates(return_state=True))
        published = completed(publish(registry, decision, return_state=True))
        moved = completed(move_candidate(registry, published, decision, return_state=True))
        answer = completed(smoke_test(published, return_state=True))
    except BaseException as error:  # an interrupt between alias and smoke test must not leave the alias there
        put_back(registry, before, published)
        if isinstance(error, StepFailed):
            return Failed(message=str(error))
        raise
    text = outcome(published, moved)
    say(f"{answer}\n{text}")
    create_markdown_artifact(key="release-summary", markdown=text, description="The last release")
    return Completed(message=text)


def put_back(registry: Registry, before: int | None, published: Published | None) -> None:
    """Undo this flow's move of `candidate`, and only that: another release may have moved it since."""
    now = registry_module.candidate_version(registry)
    if published is not None and now == published.version and now != before:
        registry_module.point_alias(registry, before)


def outcome(published: Published, moved: bool) -> str:
    """One line on what has happened."""
    version = f"{published.name} version {published.version}"
    made = "new" if published.created else "registered before"
    alias = "candidate now points to it" if moved else "candidate pointed to it already"
    return f"release: {version} ({made}), bundle {published.bundle_sha256[:12]}, {alias}"


def release_tags() -> ReleaseTags:
    """Provenance of the bundle at hand."""
    manifest = read_manifest(paths.BUNDLE)
    data = "".join(sha256_file(path) for path in (paths.PROMPTS, paths.ANSWERS) if path.is_file())
    return ReleaseTags(
        git_sha=git_sha(),
        data_sha256=hashlib.sha256(data.encode()).hexdigest() if data else "unknown",
        backbone_sha256=manifest.backbone.weights_sha256,
        head_sha256=manifest.head.weights_sha256,
        precision=manifest.precision,
    )


def git_sha(folder: Path = Path()) -> str:
    """The commit checked out, with `-dirty` for tracked changes; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
