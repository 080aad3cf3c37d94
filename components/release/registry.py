"""The model registry: publish a bundle, move the alias `candidate`, load by alias.

Owns the reconciliation of one bundle with the registry, keyed by the bundle's hash: run twice, it changes nothing. It
refuses to move `candidate` without a passed decision about exactly these bytes. Its surprising decision: in a SQLite
store a version's source is a path *relative* to the project, because an absolute one breaks when the project is moved.
MLflow takes it from the working folder, so its own `models:/` opens in the project only; `load_candidate` opens it
wherever one is. (An absolute `artifact_root` is the other choice: MLflow opens it anywhere, and it cannot be moved.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from components.core.config import Registry
from components.core.errors import UserError
from components.core.files import atomic_folder, sha256_folder
from components.core.manifest import bundle_hash, check_files, read_manifest
from components.core.paths import WORK
from components.release.gates import Decision
from components.release.tracking import (
    database_path,
    experiment_id,
    open_client,
    resolve_tracking_uri,
    store_fault,
)

CANDIDATE = "candidate"
HASH_TAG = "bundle_sha256"
GATE_TAG = "gate_passed"


NOWHERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow: no such model; no such alias


@dataclass(frozen=True)
class ReleaseTags:
    """Where a bundle comes from; written once, when its version is made."""

    git_sha: str
    data_sha256: str
    backbone_sha256: str
    head_sha256: str
    precision: str


@dataclass(frozen=True)
class Published:
    """A registered version of a bundle; ``created`` is False when it was there already."""

    name: str
    version: int
    bundle_sha256: str
    created: bool


@dataclass(frozen=True)
class Source:
    """Where a version's files are; a server wants the run that holds them."""

    uri: str
    run_id: str | None = None


@contextmanager
def _one_at_a_time(registry: Registry) -> Iterator[None]:
    """Serialise publishing on this machine; a server's own transactions have to do elsewhere."""
    database = database_path(registry)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name("publish.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def publish(
    bundle: Path, reports: Path, evidence: Sequence[str], decision: Decision, registry: Registry, tags: ReleaseTags
) -> Published:
    """Make sure that the registry holds this bundle once, with its newest evidence and verdict.

    Args:
        bundle: folder of the bundle.
        reports: folder below which the evidence lies.
        evidence: evidence files to keep beside the model.
        decision: the verdict about this very bundle.
        registry: where.
        tags: provenance.

    Raises:
        UserError: the bundle is damaged, the decision is about another one, or the store does not work.
    """
    check_files(bundle, read_manifest(bundle))
    digest = _same_bundle(bundle_hash(bundle), decision)
    try:
        with _one_at_a_time(registry):
            client = open_client(registry)
            found = find_version(client, registry.model_name, digest)
            files = {Path(name).relative_to(reports): Path(name) for name in evidence}
            source = _store_files(client, registry, bundle, digest, files)
            version = found or _create_version(client, registry.model_name, source, asdict(tags) | {HASH_TAG: digest})
            verdict = str(decision.passed).lower()
            if version.tags.get(GATE_TAG) != verdict:
                client.set_model_version_tag(registry.model_name, version.version, GATE_TAG, verdict)
    except MlflowException as error:
        raise store_fault(registry, error) from None
    return Published(registry.model_name, int(version.version), digest, created=found is None)


def _same_bundle(digest: str, decision: Decision) -> str:
    if digest != decision.bundle_sha256:
        seen = f"bundle {digest[:16]}.., decision about {decision.bundle_sha256[:16] or 'no bundle'}.."
        raise UserError("the decision is about another bundle", seen, "run `mtp repro`, then `mtp release`")
    return digest


def find_version(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    """The version whose bundle has this hash; the oldest, should there ever be two."""
    found = client.search_model_versions(f"name = '{name}' and tags.{HASH_TAG} = '{digest}'")
    return min(found, key=lambda version: int(version.version), default=None)


def _create_version(client: MlflowClient, name: str, source: Source, tags: dict[str, str]) -> ModelVersion:
    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)
    return client.create_model_version(name, source.uri, run_id=source.run_id, tags=tags)


def _store_files(
    client: MlflowClient, registry: Registry, bundle: Path, digest: str, evidence: dict[Path, Path]
) -> Source:
    """Put the model and its evidence where the store keeps files; returns where."""
    if database_path(registry) is None:
        return _upload(client, registry, bundle, digest, evidence)
    folder = Path(registry.artifact_root) / "models" / digest
    if not folder.is_dir():
        with atomic_folder(folder) as temporary:
            _save_model(bundle, temporary)
    _replace_evidence(folder / "evidence", evidence)
    return Source(folder.as_posix())


def _upload(client: MlflowClient, registry: Registry, bundle: Path, digest: str, evidence: dict[Path, Path]) -> Source:
    """The same for a server: files are artifacts of one run per bundle, found again by its tag."""
    experiment = experiment_id(client, registry)
    runs = client.search_runs([experiment], f"tags.{HASH_TAG} = '{digest}' and tags.kind = 'release'")
    tags = {HASH_TAG: digest, "kind": "release"}
    run = runs[0] if runs else client.create_run(experiment, run_name=f"release {digest[:12]}", tags=tags)
    with _scratch() as scratch:
        model = scratch / "model"
        if run.info.status != "FINISHED":  # finished means that all files have arrived
            _save_model(bundle, model)
        _replace_evidence(model / "evidence", evidence)
        client.log_artifacts(run.info.run_id, str(model), "model")
    client.set_terminated(run.info.run_id)
    return Source(f"{run.info.artifact_uri}/model", run.info.run_id)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that is gone afterwards; in the workspace, because /tmp may be small or memory."""
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        yield Path(folder)


def _save_model(bundle: Path, folder: Path) -> None:
    from components.release.model import save_model  # opens onnxruntime; only a first publication needs it

    save_model(bundle, folder)


def _replace_evidence(folder: Path, files: dict[Path, Path]) -> None:
    with _scratch() as scratch:
        for name, path in files.items():
            copy = scratch / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        if folder.is_dir() and sha256_folder(folder) == sha256_folder(scratch):
            return
        with atomic_folder(folder) as temporary:
            shutil.copytree(scratch, temporary, dirs_exist_ok=True)


def candidate_version(registry: Registry, alias: str = CANDIDATE) -> int | None:
    """The version that an alias points to, None when it points nowhere.

    Raises:
        UserError: the store does not answer; that must not be taken for "nowhere", or a roll-back would drop the alias.
    """
    try:
        return int(open_client(registry).get_model_version_by_alias(registry.model_name, alias).version)
    except MlflowException as error:
        if error.error_code in NOWHERE:
            return None
        raise store_fault(registry, error) from None


def set_candidate(registry: Registry, published: Published, decision: Decision) -> bool:
    """Let `candidate` point to a published bundle; returns False when it did already.

    Raises:
        UserError: the gates refused the bundle, or the decision is about another one.
    """
    _same_bundle(published.bundle_sha256, decision)
    if not decision.passed:
        reasons = "; ".join(rule.rule for rule in decision.refusals)
        raise UserError("the gates refused this bundle; `candidate` stays where it is", reasons, "see `mtp gate`")
    if candidate_version(registry) == published.version:
        return False
    point_alias(registry, published.version)
    return True


def point_alias(registry: Registry, version: int | None, alias: str = CANDIDATE) -> None:
    """Let an alias point to ``version``, or to nothing: how a failed release is undone."""
    client = open_client(registry)
    try:
        if version is None:
            client.delete_registered_model_alias(registry.model_name, alias)
        else:
            client.set_registered_model_alias(registry.model_name, alias, str(version))
    except MlflowException as error:
        raise store_fault(registry, error) from None


@contextmanager
def _addressed(address: str) -> Iterator[None]:
    """Let MLflow resolve `models:/` at ``address``; its setters would leave that in the environment of every child."""
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, address))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def load_candidate(registry: Registry, alias: str = CANDIDATE) -> Any:
    """Load the model that an alias points to; returns MLflow's PyFuncModel.

    Any working folder will do when ``registry.tracking_uri`` is absolute, as in sqlite:////project/.mlflow/mlflow.db.

    Raises:
        UserError: there is no such store, no version has that alias, or its files are gone.
    """
    uri = f"models:/{registry.model_name}@{alias}"
    database = database_path(registry)
    if database is not None and not database.is_file():  # opening it would make an empty one
        remedy = "cd to the project's folder, or write the store's absolute address"
        raise UserError(f"{uri} cannot be loaded", f"no MLflow store {database.resolve()}", remedy)
    client = open_client(registry)
    try:
        version = client.get_model_version_by_alias(registry.model_name, alias)
        with _addressed(resolve_tracking_uri(registry)):
            return mlflow.pyfunc.load_model(uri if database is None else str(_found(database, str(version.source))))
    except (MlflowException, FileNotFoundError) as error:
        raise UserError(
            f"{uri} cannot be loaded", str(error)[:200], "run `mtp release` in the project folder"
        ) from None


def _found(database: Path, source: str) -> Path:
    """The folder of a version's files: ``source`` counts from the project, which holds the store or is where we are.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    for folder in (*database.resolve().parents, Path.cwd()):
        if (folder / source / "MLmodel").is_file():
            return folder / source
    raise FileNotFoundError(f"no {source}/MLmodel above {database.resolve()} or in {Path.cwd()}")
