"""MLflow runs: parameters and curves of one training, in a SQLite file inside the project or on a server.

Owns how the store is opened and how a run begins, goes on and ends. It refuses a run that ends well without saying so:
whatever is not finished explicitly is FAILED (an exception, an exit) or stays RUNNING (SIGKILL), never FINISHED. Its
surprising decision: a resumed run skips the steps that it has logged already, so a retry draws no second curve.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from components.core.config import Registry
from components.core.errors import UserError
from components.core.files import atomic_path
from components.core.host import set_quiet_environment

set_quiet_environment()
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # an absent server is told in seconds, not in minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
for _name, _value in MLFLOW_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

from mlflow import MlflowClient  # noqa: E402  (reads the environment when imported)
from mlflow.entities import Metric, Param  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # "Creating initial tables" is no news

SQLITE = "sqlite:///"
PARAM_CHARACTERS = 6000  # MLflow's limit on one value
BATCH = 100  # MLflow's limit on parameters in one request
Status = Literal["FINISHED", "FAILED", "KILLED"]


def database_path(registry: Registry) -> Path | None:
    """The SQLite file of a store that lies on this machine, None for a server.

    Raises:
        UserError: the address is of another kind.
    """
    address = registry.tracking_uri
    if address.startswith(SQLITE) and len(address) > len(SQLITE):
        return Path(address.removeprefix(SQLITE))
    if address.startswith(("http://", "https://")):
        return None
    remedy = "write sqlite:///PATH or http(s)://HOST in params.yaml"
    raise UserError("registry.tracking_uri names no store", f"value {address!r}", remedy)


def resolve_tracking_uri(registry: Registry) -> str:
    """The address MLflow gets: a relative SQLite path is taken from the project folder, and its folder is made."""
    path = database_path(registry)
    if path is None:
        return registry.tracking_uri
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "the folder of the MLflow store cannot be made", str(error), "correct registry.tracking_uri in params.yaml"
        ) from None
    return f"{SQLITE}{path.resolve()}"


@contextmanager
def _store_lock(path: Path | None) -> Iterator[None]:
    """Hold a lock beside the SQLite file: MLflow's own first-time migration is not safe between processes."""
    if path is None:
        yield
        return
    with path.with_name(f"{path.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def open_client(registry: Registry) -> MlflowClient:
    """A client of a store that exists and is migrated; safe for several processes starting at once.

    Raises:
        UserError: the store cannot be opened, or the server does not answer.
    """
    address = resolve_tracking_uri(registry)
    try:
        with _store_lock(database := database_path(registry)):
            if database is not None and not database.exists():
                _make_store(database)
            client = _migrated(address)
    except (MlflowException, OSError) as error:
        raise store_fault(registry, error) from None
    return client


def _migrated(address: str) -> MlflowClient:
    """A client whose store has all its tables."""
    client = MlflowClient(tracking_uri=address, registry_uri=address)
    client.search_experiments(max_results=1)
    client.search_registered_models(max_results=1)
    return client


def _make_store(database: Path) -> None:
    """A new store, moved into place when it is whole: MLflow cannot go on with tables that a killed process began."""
    for left_over in database.parent.glob(f".{database.name}.*.tmp"):
        left_over.unlink()
    with atomic_path(database) as temporary:
        _migrated(f"{SQLITE}{temporary.resolve()}")


def store_fault(registry: Registry, error: BaseException) -> UserError:
    """Three lines about a store that does not work."""
    remedy = "start that server, or set registry.tracking_uri in params.yaml to sqlite:///.mlflow/mlflow.db"
    if registry.tracking_uri.startswith(SQLITE):
        remedy = "check the file's rights and the free space; without the file a new store is made"
    return UserError(f"the MLflow store {registry.tracking_uri} does not answer", str(error)[:300], remedy)


def experiment_id(client: MlflowClient, registry: Registry) -> str:
    """Id of the configured experiment; made, or restored from MLflow's bin, when needed."""
    found = client.get_experiment_by_name(registry.experiment)
    if found is None:
        with _store_lock(database_path(registry)):
            found = client.get_experiment_by_name(registry.experiment)
            if found is None:
                return _create_experiment(client, registry)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _create_experiment(client: MlflowClient, registry: Registry) -> str:
    local = database_path(registry) is not None
    location = str(Path(registry.artifact_root).resolve()) if local else None
    try:
        return str(client.create_experiment(registry.experiment, artifact_location=location))
    except MlflowException:  # on a server another machine may have been faster
        found = client.get_experiment_by_name(registry.experiment)
        if found is None:
            raise
        return str(found.experiment_id)


class TrackingRun:
    """One MLflow run, named by its id everywhere: MLflow's own "active run" belongs to a thread, so it is never used.

    Use as a context manager: an exception marks the run FAILED; leaving the block well does *not* finish it by itself.
    """

    def __init__(self, client: MlflowClient, registry: Registry, run_id: str, logged: Mapping[str, int]) -> None:
        self.client, self.registry, self.run_id = client, registry, run_id
        self._logged = dict(logged)
        self._ended = False
        atexit.register(self._fail_if_open)

    @classmethod
    def start_or_resume(
        cls,
        registry: Registry,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> TrackingRun:
        """Begin a run, or go on with ``run_id`` (kept in the caller's checkpoint) when the store still has it.

        Args:
            registry: where the store is.
            name: name shown in the UI.
            params: flat parameters, written once; a resumed run keeps its own.
            tags: flat tags; a resumed run gets them again.

        Raises:
            UserError: the store does not work.
        """
        client = open_client(registry)
        try:
            if run_id is not None and _can_resume(client, run_id):
                client.update_run(run_id, status="RUNNING")
                for key, value in tags.items():
                    client.set_tag(run_id, key, value)
                return cls(client, registry, run_id, _last_steps(client, run_id))
            run = client.create_run(experiment_id(client, registry), run_name=name, tags=dict(tags))
            _log_params(client, run.info.run_id, params)
        except MlflowException as error:
            raise store_fault(registry, error) from None
        return cls(client, registry, str(run.info.run_id), {})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one point on each curve; a curve that has reached ``step`` already is left alone."""
        fresh = {key: value for key, value in metrics.items() if step > self._logged.get(key, -1)}
        if not fresh:
            return
        now_ms = int(time.time() * 1000)
        points = [Metric(key, float(value), now_ms, step) for key, value in fresh.items()]
        try:
            self.client.log_batch(self.run_id, metrics=points)
        except MlflowException as error:
            raise store_fault(self.registry, error) from None
        self._logged.update(dict.fromkeys(fresh, step))

    def finish(self, status: Status = "FINISHED") -> None:
        """End the run; a second call changes nothing."""
        if self._ended:
            return
        try:
            self.client.set_terminated(self.run_id, status=status)
        except MlflowException as error:
            raise store_fault(self.registry, error) from None
        self._ended = True
        atexit.unregister(self._fail_if_open)

    def _fail_if_open(self) -> None:
        if not self._ended:
            self.finish("FAILED")

    def __enter__(self) -> TrackingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._ended:
            return
        try:
            self.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        except UserError:  # the fault that ended the run matters more than the store's
            self._ended = True


def _can_resume(client: MlflowClient, run_id: str) -> bool:
    try:
        run = client.get_run(run_id)
    except MlflowException:
        return False
    return bool(run.info.lifecycle_stage == "active" and run.info.status != "FINISHED")


def _last_steps(client: MlflowClient, run_id: str) -> dict[str, int]:
    curves = client.get_run(run_id).data.metrics
    return {key: max(point.step for point in client.get_metric_history(run_id, key)) for key in curves}


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    rows = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in params.items()]
    for start in range(0, len(rows), BATCH):
        client.log_batch(run_id, params=rows[start : start + BATCH])
