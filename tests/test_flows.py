"""Prefect reports what happened: a failed stage fails the flow, nothing after it runs, no alias moves."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.core.errors import UserError
from components.core.files import write_json
from components.core.manifest import TaskPrompt
from components.data.free_text import example_row, fill_from_row, fill_from_text, notification_slots, unused_keys
from components.release.evidence import load_evidence
from components.release.gates import decide
from components.release.registry import Published
from helpers_bundle import random_head, tiny_bundle
from helpers_release import GATES, write_fake_bundle, write_good_evidence
from pipelines.flows import PREFECT_ENVIRONMENT, prepare_environment, release, smoke
from pipelines.flows.build import run_stage
from pipelines.flows.steps import StepFailed, completed, run_flow
from pipelines.repro import check_disk, reproduce

ROOT = Path(__file__).resolve().parent.parent
BUNDLE, REPORTS = Path("models/bundle"), Path("models/reports")
BROKEN = 'printf "error: a broken stage\\n seen: x\\n next: y\\n" >&2; exit 2\n'


@pytest.fixture(scope="module")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dvc init` makes, made once."""
    folder = tmp_path_factory.mktemp("dvc")
    command = [sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "DVC_NO_ANALYTICS": "1"})
    return folder


def make_project(folder: Path, second: str, empty_repository: Path) -> None:
    """A DVC project of three stages; ``second`` is the script of the middle one."""
    shutil.copytree(empty_repository, folder)
    stages = {
        "first": {"cmd": "echo 1 > a", "outs": ["a"]},
        "second": {"cmd": "bash second.sh", "deps": ["a", "second.sh"], "outs": ["b"]},
        "third": {"cmd": "echo 3 > c", "deps": ["b"], "outs": ["c"]},
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    (folder / "second.sh").write_text(second)
    (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text())


@pytest.fixture
def broken(tmp_path: Path, empty_repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose second stage fails with three lines."""
    make_project(tmp_path / "project", BROKEN, empty_repository)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


# --- single steps, without a Prefect server -----------------------------------------------------------------------


def test_a_stage_that_works_gives_its_name_and_only_it_runs(broken: Path) -> None:
    assert run_stage.fn("first") == "first"
    assert (broken / "a").exists()
    assert not (broken / "b").exists()


def test_a_stage_that_fails_gives_a_failed_state_with_its_own_three_lines(broken: Path) -> None:
    run_stage.fn("first")
    state = run_stage.fn("second")
    assert state.is_failed()
    assert state.message == "error: a broken stage\n seen: x\n next: y"
    with pytest.raises(StepFailed, match="a broken stage"):
        completed(state)


def test_repro_repeats_the_stage_s_own_words_after_relaying_everything(broken: Path) -> None:
    lines: list[str] = []
    with pytest.raises(UserError) as caught:
        reproduce([], lines.append)
    assert caught.value.what == "a broken stage"
    assert " next: y" in lines
    assert not (broken / "c").exists()


def test_a_stage_that_crashes_is_named_with_its_last_line(broken: Path) -> None:
    (broken / "second.sh").write_text("echo Traceback >&2; echo 'ValueError: seven' >&2; exit 1\n")
    with pytest.raises(UserError) as caught:
        reproduce(["second"], lambda _: None)
    assert "second" in caught.value.what
    assert "ValueError: seven" in caught.value.seen


def test_stages_get_the_interpreter_that_runs_us(broken: Path) -> None:
    (broken / "second.sh").write_text("command -v python > b\n")
    reproduce(["second"], lambda _: None)
    assert (broken / "b").read_text().strip() == str(Path(sys.executable).parent / "python")


@pytest.mark.parametrize(
    ("change", "told"),
    [("unknown: 1\n", "unknown"), ("train: {seed: 1}\n", "train"), (": [", "not valid YAML")],
)
def test_wrong_parameters_stop_before_dvc_starts(broken: Path, change: str, told: str) -> None:
    (broken / "params.yaml").write_text((ROOT / "params.yaml").read_text() + change)
    lines: list[str] = []
    with pytest.raises(UserError, match=told):
        reproduce([], lines.append)
    assert not lines


def test_an_unknown_stage_is_named(broken: Path) -> None:
    with pytest.raises(UserError, match="fourth"):
        reproduce(["fourth"], lambda _: None)


def test_too_small_a_disk_is_told_before_anything_runs() -> None:
    with pytest.raises(UserError, match="too little disk space"):
        check_disk(needed_bytes=2**60)


def test_prefect_keeps_its_state_in_the_project_and_respects_the_user(tmp_path: Path) -> None:
    environment = {"PREFECT_API_URL": "http://elsewhere/api", "NO_PROXY": "example.org"}
    prepare_environment(environment, tmp_path)
    assert environment["PREFECT_HOME"] == str(tmp_path / ".prefect")
    assert environment["PREFECT_API_URL"] == "http://elsewhere/api"
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert int(environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"]) >= 120


def test_prefect_knows_every_setting_that_is_given_to_it() -> None:
    from prefect.settings import get_current_settings

    known = get_current_settings().to_environment_variables()
    assert set(PREFECT_ENVIRONMENT) <= set(known)


def test_a_server_that_does_not_start_gives_three_lines() -> None:
    def flow(return_state: bool) -> None:
        raise RuntimeError("Timed out while attempting to connect to ephemeral Prefect API server.")

    with pytest.raises(UserError, match="did not start"):
        run_flow(flow)


def test_a_crash_inside_a_flow_is_no_user_error() -> None:
    def flow(return_state: bool) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_flow(flow)


def test_the_gates_stop_a_release_with_reasons(broken: Path) -> None:
    state = release.check_gates.fn()
    assert state.is_failed()
    assert "training.json: no such file" in state.message


def write_gate(passed: bool = True) -> str:
    """gate.json as the stage would write it."""
    decision = decide(load_evidence(), GATES)
    assert decision.passed, decision.refusals
    write_json(REPORTS / "gate.json", decision.as_dict({}) | {"passed": passed})
    return decision.bundle_sha256


def test_a_stale_verdict_stops_a_release(broken: Path) -> None:
    write_fake_bundle(BUNDLE)
    write_good_evidence(broken, BUNDLE)
    digest = write_gate()
    assert release.check_gates.fn().bundle_sha256 == digest
    write_gate(passed=False)
    assert "out of date" in release.check_gates.fn().message


def test_a_smoke_test_that_fails_says_why(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "SMOKE", "no_such_module")
    state = release.smoke_test.fn(Published("tiny", 1, "0" * 64, True))
    assert state.is_failed()
    assert "No module named no_such_module" in state.message


def test_the_smoke_test_refuses_another_bundle() -> None:
    class Model:
        def unwrap_python_model(self) -> Any:
            return type("Python", (), {"bundle": type("Bundle", (), {"sha256": "a" * 64})})

    with pytest.raises(UserError, match="another bundle"):
        smoke.smoke(Model(), "b" * 64)


def test_provenance_outside_a_repository_is_unknown(tmp_path: Path) -> None:
    assert release.git_sha(tmp_path) == "unknown"


# --- what a person types fills the prompt -------------------------------------------------------------------------


def test_notifications_are_worded_as_in_the_training_prompts() -> None:
    from components.data.corpora import Conversation, Message
    from components.data.recipes import notifications

    texts = [f"are you coming to the {place} with us today" for place in ("market", "lake", "party", "park", "show")]
    chat = Conversation("c", tuple(Message("s1", text) for text in texts * 2))
    stack = next(notifications([chat], ("Anna",), seed=1))
    typed = " | ".join(f"Anna: {text}" for text in stack.source_text.splitlines())
    assert notification_slots(typed) == stack.slots


def asks(rendered: str, **choices: tuple[str, ...]) -> TaskPrompt:
    return TaskPrompt(rendered=rendered, choices=choices, stop_texts=(), max_new_tokens=1)


STACK_TASK = asks("{notifications} {sender}")


def test_defaults_explicit_slots_and_the_only_slot_left() -> None:
    assert fill_from_text(asks("{me} {text}"), "hi", {}) == {"me": "Alex", "text": "hi"}
    assert fill_from_text(asks("{me} {text}"), "hi", {"me": "Ben"}) == {"me": "Ben", "text": "hi"}
    assert fill_from_text(asks("{headline}"), "hi", {}) == {"headline": "hi"}
    assert fill_from_text(asks("{text}"), "", {"text": "hi"}) == {"text": "hi"}
    stack = {"notifications": 'Anna says: "hi"', "sender": "Anna"}
    assert fill_from_text(STACK_TASK, "Anna", {"notifications": stack["notifications"]}) == stack


def test_a_choice_that_is_left_out_takes_its_first_text() -> None:
    task = asks("{text} {tone}", tone=("warm", "formal"))
    assert fill_from_text(task, "hi", {}) == {"text": "hi", "tone": "warm"}
    assert fill_from_text(task, "hi", {"tone": "a pirate's"}) == {"text": "hi", "tone": "a pirate's"}
    assert fill_from_row(task, {"text": "hi"}) == {"text": "hi", "tone": "warm"}
    assert fill_from_row(task, {"text": "hi", "tone": "formal"}) == {"text": "hi", "tone": "formal"}
    assert fill_from_row(task, json.loads(example_row(task)))["tone"] == "warm"
    assert unused_keys(task, {"text": "hi", "tone": "formal", "limit": "short"}) == {"limit"}
    assert smoke.sample_slots(task)["tone"] == "warm"


def test_a_row_of_a_file_fills_slots_by_name_or_from_its_text() -> None:
    stack = {"notifications": 'Anna says: "at 5?" Ben says: "yes"', "sender": "Anna"}
    assert fill_from_row(STACK_TASK, stack) == stack
    assert fill_from_row(STACK_TASK, {"text": "Anna: at 5? | Ben: yes"}) == stack
    assert fill_from_row(asks("{me} {text}"), {"text": "hi", "id": 3}) == {"me": "Alex", "text": "hi"}
    headline = asks("{headline}")
    assert fill_from_row(headline, {"text": "hi"}) == fill_from_row(headline, {"headline": "hi"})
    assert fill_from_row(headline, {"headline": "hi", "text": "ho"}) == {"headline": "hi"}
    assert unused_keys(asks("{me} {text}"), {"text": "hi", "id": 3}) == {"id"}
    assert unused_keys(headline, {"text": "hi"}) == set()
    assert unused_keys(headline, {"text": "hi", "headline": "ho"}) == {"text"}
    for rendered in ("{text}", "{me} {text}", "{one} {two}", "{headline}", "{notifications} {sender}"):
        assert all(fill_from_row(asks(rendered), json.loads(example_row(asks(rendered)))).values())
    for row, told in (({"notifications": "x"}, "sender is missing"), ({"text": None}, "text is not a text")):
        with pytest.raises(UserError, match=told):
            fill_from_row(STACK_TASK, row)
    with pytest.raises(UserError, match="headline is missing"):
        fill_from_row(asks("{text} {headline}"), {"text": "hi"})


@pytest.mark.parametrize(
    ("rendered", "text", "given", "told", "do"),
    [
        ("{text}", "hi", {"other": "x"}, "no slot 'other'", "correct --slot"),
        ("{text}", "  ", {}, "there is no text", "give some text, for example"),
        ("{notifications} {sender}", "", {}, "there is no text", "Anna: see you at 5"),
        ("{one} {two}", "hi", {}, "'one' is empty", "--slot one=VALUE --slot two=VALUE"),
        ("{text}", "hi", {"text": "ho"}, "the text fills no slot", "leave out the text"),
        ("{me} {text}", "hi", {"text": "ho"}, "the text fills no slot", "leave out the text"),
        ("{text}", "", {"text": " "}, "'text' is empty", "--slot text=VALUE"),
        ("{notifications} {sender}", "no name here", {}, "NAME: message", "for example"),
        ("{notifications} {sender}", "Anna: ", {}, "NAME: message", "for example"),
        ("{notifications} {sender}", "|", {}, "no notification", "for example"),
    ],
)
def test_what_cannot_be_filled_is_told(rendered: str, text: str, given: dict[str, str], told: str, do: str) -> None:
    with pytest.raises(UserError) as refused:
        fill_from_text(asks(rendered), text, given)
    assert told in refused.value.what
    assert do in refused.value.do


# --- the one test with Prefect's own server -----------------------------------------------------------------------

WHOLE_STORY = """
import json, sys
from pathlib import Path
from components.core.params import load_params
from components.core.errors import UserError
from components.release.registry import candidate_version, open_client, point_alias
from pipelines.flows import release as module
from pipelines.flows.build import build
from pipelines.flows.steps import run_flow

registry, told = load_params().registry, {}

def attempt(name, flow):
    try:
        run_flow(flow)
        told[name] = "well"
    except UserError as error:
        told[name] = error.what
    told[name + " candidate"] = candidate_version(registry)

attempt("build", build)
attempt("release", module.release)
attempt("release again", module.release)
client = open_client(registry)
client.create_model_version(registry.model_name, "nowhere")  # an older candidate, which must come back
point_alias(registry, 2)
module.SMOKE = "no_such_module"
attempt("broken release", module.release)
Path("second.sh").write_text(sys.argv[1])
Path("c").unlink()
attempt("broken build", build)
told["third ran"] = Path("c").exists()
told["versions"] = len(client.search_model_versions(""))
Path("told.json").write_text(json.dumps(told))
"""


def states(project: Path) -> list[tuple[str, str]]:
    """Flow name and final state of every flow run in Prefect's own store."""
    with sqlite3.connect(project / ".prefect/prefect.db") as database:
        query = "select f.name, r.state_type from flow_run r join flow f on f.id = r.flow_id order by r.start_time"
        return list(database.execute(query))


@pytest.mark.timeout(900)  # five flows and a server: a minute, or many on a busy machine
def test_the_whole_story_with_prefect_from_an_empty_home(
    tmp_path: Path, empty_repository: Path, tiny_backbone_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.modeling.backbone import load_backbone

    project, home = tmp_path / "project", tmp_path / "home"
    make_project(project, "echo 2 > b\n", empty_repository)
    home.mkdir()
    monkeypatch.chdir(project)
    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(BUNDLE, tiny_backbone_dir, backbone, random_head(backbone))
    write_good_evidence(project, BUNDLE)
    write_gate()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_STORY, BROKEN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((project / "told.json").read_text()) == {
        "build": "well",
        "build candidate": None,
        "release": "well",
        "release candidate": 1,
        "release again": "well",
        "release again candidate": 1,
        "broken release": "the smoke test failed",
        "broken release candidate": 2,
        "broken build": "a broken stage",
        "broken build candidate": 2,
        "third ran": False,
        "versions": 2,
    }
    well, failed = "COMPLETED", "FAILED"
    wanted = [("build", well), ("release", well), ("release", well), ("release", failed), ("build", failed)]
    assert states(project) == wanted
    assert "Traceback" not in done.stderr + done.stdout
    assert not [path for path in home.rglob("*") if path.is_file() and "prefect" in path.as_posix().lower()]
