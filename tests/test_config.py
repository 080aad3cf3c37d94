"""params.yaml: strict, typed, and visible to a stage only as far as dvc.yaml says."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.core.errors import UserError, exits_cleanly, is_disk_full
from components.core.files import atomic_folder, atomic_path, sha256_folder, write_json
from components.core.host import allowed_cores, resolve_threads
from components.core.params import ParamsView, load_params, parse_params
from pipelines.stages.common import load_stages, stage_params

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def document() -> Any:
    return yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))


def test_the_committed_parameters_are_valid(document: Any) -> None:
    assert parse_params(document).train.draft_length == len(document["train"]["step_weights"])


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("train", "lerning_rate"), 1, "train.lerning_rate"),
        (("tarin",), {}, "tarin"),
        (("train", "epochs"), 0, "train.epochs"),
        (("train", "step_weights"), [1.0], "train"),
        (("backbone", "source"), "http:x", "backbone"),
        (("backbone", "sha256"), None, "backbone"),
        (("tasks", "proofread", "recipe"), "jsonl", "tasks.proofread"),
        (("tasks", "Bad Name"), {"recipe": "misspelt", "user": "{text}"}, "tasks"),
        (("runtime", "max_length"), 64, "the file"),
    ],
)
def test_a_wrong_key_is_named_in_three_lines(document: Any, path: tuple[str, ...], value: Any, named: str) -> None:
    section = document
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    with pytest.raises(UserError) as error:
        parse_params(document)
    assert named in error.value.what
    assert len(error.value.render().splitlines()) == 3


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"choices": {"tone": ["warm"]}}, "choice `tone` is no slot of the template"),
        ({"choices": {"text": ["hi"]}}, "recipe last_message fills"),
        ({"user": "{text} {tone}", "choices": {"tone": []}}, "needs one text or more"),
        ({"user": "{text} {tone}", "choices": {"tone": ["warm", " "]}}, "needs one text or more"),
        ({"user": "{text} {tone}"}, "cannot fill {tone}"),
        ({"recipe": "misspelt", "user": "{text}"}, "cannot fill {me}"),
        ({"messages": [2, 3]}, "recipe last_message reads no `messages`"),
        ({"recipe": "jsonl", "path": "x.jsonl", "characters": [1, 2]}, "recipe jsonl reads no `characters`"),
        ({"characters": [30, 20]}, "must not be more than the second"),
        ({"characters": [0, 20]}, "greater than 0"),
        ({"stop_texts": [""]}, "must not be empty"),
    ],
)
def test_a_task_that_cannot_be_built_is_refused_when_it_is_read(
    document: Any, changed: dict[str, Any], told: str
) -> None:
    document["tasks"]["smart_reply"] |= changed
    with pytest.raises(UserError, match=r"tasks\.smart_reply") as error:
        parse_params(document)
    assert told in error.value.seen
    assert "{'" not in error.value.seen, "a whole section says less than its name"


def test_choices_and_bounds_are_read(document: Any) -> None:
    more = {"user": "{text} {tone}", "choices": {"tone": ["warm", "formal"]}, "characters": [100, 400]}
    document["tasks"]["smart_reply"] |= more
    task = parse_params(document).tasks["smart_reply"]
    assert (task.choices, task.characters, task.messages) == ({"tone": ("warm", "formal")}, (100, 400), None)


def test_a_misspelt_key_is_named_as_it_was_written(document: Any) -> None:
    document["distil"]["chunk_promts"] = document["distil"].pop("chunk_prompts")
    with pytest.raises(UserError, match="chunk_promts"):
        parse_params(document)


@pytest.mark.parametrize("text", ["a: [1", "", "- 1", "backbone: 3"])
def test_a_broken_file_is_a_user_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        load_params(path)


def test_a_stage_cannot_read_what_it_does_not_declare(document: Any) -> None:
    view = ParamsView(parse_params(document), frozenset({"data", "head.kv_layers"}))
    assert view.data.seed == document["data"]["seed"]
    assert list(view.head.kv_layers) == document["head"]["kv_layers"]
    with pytest.raises(KeyError, match=r"head\.intermediate_size"):
        _ = view.head.intermediate_size
    with pytest.raises(KeyError, match="train"):
        _ = view.train


def test_every_stage_gets_its_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in load_stages():
        stage_params(name)
    with pytest.raises(UserError, match="no stage"):
        stage_params("nonsense")


def test_errors_end_a_program_with_code_2_and_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    @exits_cleanly
    def fails() -> None:
        raise UserError("it broke", "a crack\nwith two lines", "glue it")

    @exits_cleanly
    def fills_the_disk() -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "x.bin")
        except OSError as error:
            raise RuntimeError("wrapped by a library") from error

    for program, word in ((fails, "it broke"), (fills_the_disk, "disk is full")):
        with pytest.raises(SystemExit) as end:
            program()
        assert end.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 3 and word in lines[0]


def test_a_bug_keeps_its_traceback() -> None:
    @exits_cleanly
    def bug() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bug()
    assert not is_disk_full(ZeroDivisionError())


def test_a_file_exists_only_when_whole(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.txt"
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with pytest.raises(ValueError, match="JSON"):
        write_json(target, {"x": float("nan")})
    assert list(target.parent.iterdir()) == []


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for content in ("one", "two"):
        with atomic_folder(target) as temporary:
            (temporary / "file").write_text(content)
    before = sha256_folder(target)
    with pytest.raises(RuntimeError), atomic_folder(target) as temporary:
        (temporary / "file").write_text("three")
        raise RuntimeError
    assert sha256_folder(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_threads_respect_the_cores_allowed() -> None:
    assert resolve_threads(0) == allowed_cores()
    assert resolve_threads(10_000) == allowed_cores()
    assert resolve_threads(1) == 1
