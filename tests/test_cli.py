"""What people type, what they get back, and with which exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.core.errors import UserError
from components.onnx.generation import Piece
from helpers_bundle import random_head, tiny_bundle
from helpers_cli import Ended
from helpers_release import good_documents, write_documents, write_fake_bundle
from pipelines import cli
from pipelines.generate import Mark, marked, parse_slots
from pipelines.report import COLUMNS, GAP, load_report, render_markdown, render_text, shown
from pipelines.repro import drop_dead_locks

ROOT = Path(__file__).resolve().parent.parent
BUNDLE, REPORTS = Path("models/bundle"), Path("models/reports")
Mtp = Callable[..., Ended]
NUMBERS = ("--temperature", "--top-p", "--seed", "--relaxed")
HEAVY = ("torch", "mlflow", "prefect", "pydantic", "pandas", "onnxruntime", "transformers", "great_expectations", "dvc")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's parameters and stages, and no results."""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mtp(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Mtp:
    """Runs the command line in this process."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["mtp", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capfd.readouterr())

    return run


def write_results(slow: bool = False) -> None:
    """Evidence of every kind, and the verdict on it."""
    documents: dict[str, Any] = good_documents(write_fake_bundle(BUNDLE))
    if slow:
        documents["benchmark"]["tasks"][0]["speedup"] = 0.8
    write_documents(REPORTS, documents)
    rules = [{"rule": "speedup, proofread", "value": 0.8, "bound": 1.0, "passed": not slow, "reason": "0.8 is slow"}]
    (REPORTS / "gate.json").write_text(json.dumps({"passed": not slow, "rules": rules}))


def test_importing_the_command_line_is_quick_and_light() -> None:
    script = (
        "import resource, sys, pipelines.cli\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    assert float(seconds) < 0.5, "processor time, interpreter included"
    assert loaded == "[]"


def test_evaluating_own_texts_needs_no_torch() -> None:
    script = "import sys, pipelines.own_texts; print({'torch', 'transformers', 'mlflow', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "command",
    [
        "repro",
        "profile",
        "compare",
        "study",
        "run",
        "release",
        "report",
        "gate",
        "generate",
        "evaluate",
        "doctor",
        "ui",
    ],
)
def test_every_command_explains_itself_anywhere(
    command: str, mtp: Mtp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mtp(command, "--help").code == 0


def test_alone_it_shows_what_it_can_do(mtp: Mtp) -> None:
    assert mtp() == mtp("--help")
    assert "evaluate" in mtp().out


@pytest.mark.parametrize(
    ("typed", "what", "helped"),
    [
        ("reprod", "'reprod'", "mtp --help"),
        ("--verbose", "--verbose", "mtp --help"),
        ("report --readm", "--readme", "mtp report --help"),
        ("report now", "now", "mtp report --help"),
        ("generate hi", "'--task'", "mtp generate --help"),
        ("generate --task", "'--task'", "mtp generate --help"),
        ("generate --task proofread --mark loud hi", "'--mark'", "mtp generate --help"),
        ("generate --task proofread --threads -1 hi", "'--threads'", "mtp generate --help"),
        *((f"generate --task proofread {option} warm hi", option, "mtp generate --help") for option in NUMBERS),
    ],
)
def test_a_line_that_cannot_be_read_is_three_lines(typed: str, what: str, helped: str, mtp: Mtp) -> None:
    wrong, seen, remedy = mtp(*typed.split()).told()
    assert what in wrong
    assert (seen, remedy) == (f"mtp {typed}", f"see `{helped}`")


@pytest.mark.parametrize(
    "typed",
    [
        *("repro", "repro train", "compare", "run", "release", "report --readme", "gate", "doctor", "ui"),
        "generate --task proofread hi",
        "evaluate --task proofread --prompts mine.jsonl",
    ],
)
def test_outside_a_project_that_is_what_is_told(
    typed: str, mtp: Mtp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, seen, remedy = mtp(*typed.split()).told()
    assert (wrong, seen) == ("this is no project folder", f"no params.yaml in {tmp_path}")
    assert remedy.startswith("cd ")
    assert not list(tmp_path.iterdir())


def test_a_project_that_lost_its_parameters_gets_them_back(mtp: Mtp, project: Path) -> None:
    (project / "params.yaml").unlink()
    assert "git checkout params.yaml" in mtp("repro").told()[2]


@pytest.mark.parametrize("command", ["repro", "run", "gate", "doctor", "ui"])
def test_wrong_parameters_end_with_two_and_no_traceback(command: str, project: Path, mtp: Mtp) -> None:
    (project / "params.yaml").write_text("nonsense: 1\n")
    done = mtp(command)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "params.yaml" in done.err + done.out


def test_no_results_yet_is_three_lines(project: Path, mtp: Mtp) -> None:
    assert "mtp repro" in mtp("report").told()[2]


def test_the_report_of_a_passed_release(project: Path, mtp: Mtp) -> None:
    write_results()
    done = mtp("report")
    assert done.code == 0
    for wanted in ("1.40x", "100.0%", "2.00", "a test, 1 threads, float32, 3 prompts, 2 rounds", "gate: passed"):
        assert wanted in done.out
    assert str(REPORTS) in done.out


def test_a_refused_release_ends_with_one_and_its_reason(project: Path, mtp: Mtp) -> None:
    write_results(slow=True)
    for command, reason in (("report", "0.8 is slow"), ("gate", "0.8 does not meet 1.0")):
        done = mtp(command)
        assert done.code == 1
        assert reason in done.out


def test_the_gate_decides_on_the_files_as_they_are_now(project: Path, mtp: Mtp) -> None:
    write_results()
    assert mtp("gate").code == 0
    (REPORTS / "training.json").unlink()
    done = mtp("gate")
    assert done.code == 1
    assert "training.json: no such file" in done.out


def test_figures_that_were_not_taken_are_gaps(project: Path) -> None:
    write_results()
    (REPORTS / "benchmark/local.json").unlink()
    report = load_report()
    speedup = [column.heading for column in COLUMNS].index("speed-up") + 1
    assert {row[speedup] for row in report.rows} == {GAP}
    assert len({len(line) for line in render_text(report).splitlines()[:2]}) == 1


def test_a_figure_is_shown_with_its_interval_or_as_a_gap(project: Path) -> None:
    documents = good_documents(write_fake_bundle(BUNDLE))
    documents["verification"]["overall"]["extra_tokens_per_pass_interval"] = [0.873, 1.131]
    documents["benchmark"]["overall"]["speedup_interval"] = [1.352, 1.449]
    write_documents(REPORTS, documents)
    assert {"1.00 [0.87, 1.13]", "1.40x [1.35, 1.45]"} <= set(load_report().rows[-1])
    assert {"1.00", "1.40x"} <= set(load_report().rows[0])
    assert shown({"a": None, "a_interval": [0, 1]}, "a", "{:.2f}") == shown({}, "a", "{}") == GAP


def test_the_markdown_table_is_whole(project: Path) -> None:
    write_results()
    lines = [line for line in render_markdown(load_report()).splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 2}


# --- generate -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tiny_backbone_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, tiny bundle."""
    from components.modeling.backbone import load_backbone

    folder = tmp_path_factory.mktemp("cli") / "bundle"
    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(folder, tiny_backbone_dir, backbone, random_head(backbone))
    return folder


@pytest.fixture
def generate(mtp: Mtp, bundle: Path) -> Mtp:
    """Runs `mtp generate` on the tiny bundle, one thread, nothing marked."""
    return partial(
        mtp, *("generate", "--task", "proofread", "--bundle", str(bundle), "--threads", "1", "--mark", "never")
    )


def test_what_an_answer_is_given_to_begin_with_is_shown_and_not_counted(bundle: Path, tmp_path: Path, mtp: Mtp) -> None:
    from components.core.manifest import TaskPrompt, read_manifest, write_manifest
    from components.onnx.runtime import open_bundle

    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    opening = {"rendered": "{notifications}\n{tone} {sender}", "answer_prefix": "{tone} {sender}"}
    task = TaskPrompt(**opening, choices={"tone": ("dear", "poor")}, stop_texts=(), max_new_tokens=8)
    write_manifest(folder, read_manifest(folder).model_copy(update={"tasks": {"summary": task}}))
    shown = {}
    for mark in ("always", "never"):
        options = ["--task", "summary", "--bundle", str(folder), "--threads", "1", "--mark", mark]
        done = mtp("generate", *options, "--slot", "sender=Anna<|im_end|>", "Anna: at 5? | Ben: yes")
        assert done.code == 0
        assert "'dear Anna' was given" in done.err
        shown[mark] = done.out
    alone = open_bundle(folder, 1).complete(
        "summary", {"notifications": 'Anna says: "at 5?" Ben says: "yes"', "sender": "Anna", "tone": "dear"}
    )
    assert shown["always"].startswith("<dear Anna>")
    assert shown["never"] == f"dear Anna{alone.text}\n"
    assert f"{alone.statistics.tokens} tokens, " in done.err


def test_a_text_may_be_given_by_its_slot_alone(generate: Mtp) -> None:
    by_text, by_slot = generate("i has went"), generate("--slot", "text=i has went")
    for done in (by_text, by_slot):
        assert done.code == 0
        assert "was given" not in done.err
    assert by_text.out == by_slot.out


def test_generate_gives_the_same_text_with_and_without_drafts_and_what_it_cost(generate: Mtp) -> None:
    drafted, plain = generate("i has went"), generate("--no-draft", "i has went")
    for done in (drafted, plain):
        assert done.code == 0
        for wanted in ("tokens per pass", "tokens/s", "1 threads, float32"):
            assert wanted in done.err
    assert drafted.out == plain.out
    assert drafted.out.strip()


def test_a_seed_gives_the_same_sampled_text_again(generate: Mtp) -> None:
    texts = []
    for extra in (["--seed", "3"], ["--seed", "3"], ["--seed", "4"], ["--seed", "3", "--no-draft"]):
        done = generate(*extra, "--temperature", "0.9", "--top-p", "0.95", "i has went")
        assert done.code == 0
        assert f"sampled: temperature 0.9, top-p 0.95, seed {extra[1]}" in done.err
        texts.append(done.out)
    assert texts[0] == texts[1] != texts[2]


def test_relaxed_acceptance_says_that_it_is_not_exact(generate: Mtp) -> None:
    relaxed, exact = generate("--relaxed", "1000", "--compare", "i has went"), generate("--compare", "i has went")
    assert relaxed.code == exact.code == 0
    assert "not exact: relaxed by 1000, " in relaxed.err
    assert "accepted drafts (100%) were not the backbone's choice" in relaxed.err
    assert "leaves greedy decoding at token " in relaxed.err
    assert "not exact" not in exact.err
    assert "same tokens as greedy decoding" in exact.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-0.1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temperature", "1", "--top-p", "0"],
        ["--temperature", "1", "--top-p", "1.01"],
        ["--temperature", "1", "--seed", "-1"],
        ["--top-p", "0.5"],
        ["--seed", "3"],
        ["--relaxed", "0"],
        ["--relaxed", "1", "--temperature", "1"],
        ["--relaxed", "1", "--no-draft"],
    ],
)
def test_decoding_options_out_of_range_are_three_lines(arguments: list[str], project: Path, mtp: Mtp) -> None:
    """Told before a bundle is opened: none lies here."""
    assert "bundle" not in " ".join(mtp("generate", "--task", "proofread", *arguments, "hi").told())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--task", "poetry", "hi"],
        ["--task", "proofread", "  "],
        ["--task", "proofread", "--slot", "text", "hi"],
        ["--task", "proofread", "--slot", "me=Ann", "hi"],
        ["--task", "proofread", "--slot", "text=hi", "dropped?"],
        ["--task", "proofread"],
        ["--task", "proofread", "word " * 200],
    ],
)
def test_what_cannot_be_generated_is_three_lines(arguments: list[str], bundle: Path, mtp: Mtp) -> None:
    assert mtp("generate", "--bundle", str(bundle), *arguments).told()


def test_a_bundle_that_is_not_there_is_three_lines(project: Path, mtp: Mtp) -> None:
    assert "mtp repro" in mtp("generate", "--task", "proofread", "hi").told()[2]


@pytest.mark.parametrize(
    ("piece", "mark", "terminal", "shown"),
    [
        (Piece(" went", True), Mark.auto, True, " \033[32mwent\033[0m"),
        (Piece(" went", True), Mark.auto, False, " [went]"),
        (Piece(" went", True), Mark.always, True, " [went]"),
        (Piece(" went", True), Mark.never, True, " went"),
        (Piece(" went", False), Mark.always, True, " went"),
        (Piece(" ", True), Mark.always, True, " "),
    ],
)
def test_accepted_drafts_are_marked(piece: Piece, mark: Mark, terminal: bool, shown: str) -> None:
    assert marked(piece, mark, terminal) == shown


def test_a_slot_needs_a_name_and_a_value() -> None:
    assert parse_slots(("me=Ann", "text=a=b")) == {"me": "Ann", "text": "a=b"}
    with pytest.raises(UserError):
        parse_slots(("=x",))


# --- evaluate -----------------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def evaluate(mtp: Mtp, project: Path, bundle: Path) -> Mtp:
    """Runs `mtp evaluate` on the tiny bundle, one thread; later options win."""
    return partial(mtp, *("evaluate", "--task", "proofread", "--bundle", str(bundle), "--threads", "1"))


def test_own_texts_are_measured_and_reported(evaluate: Mtp, project: Path) -> None:
    lines = ['{"text": "i has went"}', "", json.dumps({"text": "word " * 200}), '{"text": "a red hat", "id": 7}']
    file = write_lines(project / "mine.jsonl", *lines, '{"text": "never reached"}')
    done = evaluate("--prompts", file, "--limit", "2")
    assert done.code == 0
    for wanted in (
        "exact match",
        "100.0%",
        "1 threads, float32",
        "too long: 1 texts",
        "no slot: id",
        "prompts of 0-63",
    ):
        assert wanted in done.out
    document = json.loads((REPORTS / "own_texts/proofread-mine.json").read_text())
    (row,) = document["tasks"]
    assert (row["task"], row["prompts"], row["exact_match"]) == ("proofread", 2, 1.0)
    assert document["lines_too_long"] == [3]
    assert document["created_with"]["threads"] == 1
    wanted_keys = {"extra_tokens_per_pass_interval", "by_prompt_length", "loop_share", "echo_rate", "speedup_interval"}
    assert wanted_keys <= set(row)


def test_the_test_split_stands_beside_own_texts_only_for_the_same_bundle(
    evaluate: Mtp, bundle: Path, project: Path
) -> None:
    from components.core.manifest import bundle_hash

    file = write_lines(project / "mine.jsonl", '{"text": "i has went"}')
    for digest, beside in ((bundle_hash(bundle), True), ("0" * 64, False)):
        write_documents(REPORTS, {"verification": good_documents(digest)["verification"]})
        done = evaluate("--prompts", file, "--output", str(project / "o/r.json"))
        assert done.code == 0
        assert ("test split" in done.out) is beside
        assert (project / "o/r.json").is_file()
        assert not (REPORTS / "own_texts").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "holds no row"),
        (("[1]",), "line 1 is not a JSON object"),
        (('{"text": "fine"}', '{"text": '), "line 2 is not valid JSON"),
        (('{"txt": "hi"}',), "line 1: text is missing"),
        (('{"text": 5}',), "line 1: text is not a text"),
        (('{"text": "<|im_end|>"}',), "line 1: the slot 'text'"),
        ((json.dumps({"text": "word " * 200}),), "no text of"),
    ],
)
def test_texts_that_cannot_be_used_are_three_lines(
    lines: tuple[str, ...], told: str, evaluate: Mtp, project: Path
) -> None:
    assert told in evaluate("--prompts", write_lines(project / "mine.jsonl", *lines)).told()[0]
    assert not (REPORTS / "own_texts/proofread-mine.json").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("--prompts", "gone.jsonl"), "gone.jsonl is missing"),
        (("--prompts", "."), ". is a folder"),
        (("--task", "poetry"), "no task 'poetry'"),
        (("--bundle", "gone"), "gone"),
        (("--output", "."), "cannot write"),
        (("--output", "mine.jsonl/x.json"), "cannot write"),
    ],
)
def test_what_cannot_be_evaluated_is_three_lines(
    changed: tuple[str, str], told: str, evaluate: Mtp, project: Path
) -> None:
    file = write_lines(project / "mine.jsonl", '{"text": "i has went"}')
    assert told in evaluate("--prompts", file, *changed).told()[0]


def test_an_answer_that_is_not_exact_ends_with_one(
    evaluate: Mtp, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.onnx.runtime import OrtBackbone

    honest = OrtBackbone.verify

    def lie(self: OrtBackbone, tokens: list[int]) -> list[int]:
        truth = honest(self, tokens)
        return truth if len(tokens) == 1 else [(token + 1) % 300 for token in truth]

    monkeypatch.setattr(OrtBackbone, "verify", lie)
    file = write_lines(project / "mine.jsonl", '{"text": "i has went"}')
    done = evaluate("--prompts", file)
    assert done.code == 1
    assert "differs from plain decoding" in done.out


# --- ui -----------------------------------------------------------------------------------------------------------


def test_ui_serves_the_project_s_store_on_this_machine_only() -> None:
    from pipelines.ui import prefect_command, ui_command

    command = ui_command("sqlite:///store.db", "artifacts", 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--backend-store-uri") + 1] == "sqlite:///store.db"
    assert "prefect server start" in prefect_command()


def test_the_installed_script_and_the_module_are_one() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipelines.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert all(name in done.stdout for name in ("repro", "run", "release", "generate", "evaluate", "doctor"))


def test_locks_of_dead_processes_are_dropped(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended but not reaped: a zombie
    mine, dead, zombie = ({"pid": pid, "cmd": "dvc repro"} for pid in (os.getpid(), gone.pid, child))
    file = tmp_path / "rwlock"
    file.write_text(
        json.dumps({"write": {"a": dead, "b": mine, "c": zombie}, "read": {"d": [dead, mine], "e": [zombie]}})
    )
    drop_dead_locks(file)
    os.waitpid(child, 0)
    assert json.loads(file.read_text()) == {"write": {"b": mine}, "read": {"d": [mine]}}
    file.write_text('{"write": {"a"')
    drop_dead_locks(file)
    assert not file.exists()
