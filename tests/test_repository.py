"""The layout that DESIGN promises, held by tests: who imports what, what git holds, what dvc.yaml declares."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from components.core import paths
from components.core.host import QUIET_ENVIRONMENT
from components.core.params import load_params
from helpers_repository import (
    ROOT,
    Stage,
    closure,
    holds_code,
    imports_of,
    project_modules,
    stages,
    syntax_tree,
    third_party,
    tracked_files,
)

# Folder of components -> other folders that it may import. The story: data -> modeling -> decoding -> onnx -> devices
# -> release, on core; decoding is pure and knows none of the parts that feed it.
MAY_IMPORT = {
    "core": set(),
    "data": {"core"},
    "decoding": {"core"},
    "modeling": {"core", "data", "decoding"},
    "baselines": {"core", "data", "decoding", "modeling"},
    "onnx": {"core", "data", "decoding", "modeling"},
    "devices": {"core", "data", "decoding", "onnx"},
    "release": {"core", "data", "decoding", "onnx", "devices"},
}

# Heavy package -> the modules whose job it is. Nobody imports dvc: a stage that called it would die on its lock.
HOMES = {
    "great_expectations": r"components/data/quality\.py",
    "mlflow": r"components/release/(tracking|registry|model)\.py",
    "prefect": r"pipelines/.*",
    "prefect_dask": r"pipelines/.*",
    "prefect_ray": r"pipelines/.*",
    "onnxruntime": r"components/onnx/(sessions|parity|backbone_graph)\.py",
    "onnxruntime_genai": r"components/onnx/backbone_graph\.py",
    "onnx": r"components/onnx/.*",
    "onnx_ir": r"components/onnx/.*",
    "torch": r"components/(modeling|baselines)/.*|components/onnx/(?!runtime|generation|sessions|ort_head).*"
    r"|pipelines/(stages/.*|compare|study)\.py",
    "transformers": r"components/(modeling|baselines)/.*|components/onnx/(?!runtime|generation|sessions|ort_head).*"
    r"|pipelines/stages/.*",
    "accelerate": r"components/modeling/parallel_training\.py",
    "gguf": r"components/modeling/.*",
    "typer": r"pipelines/.*",
    "dvc": r"(?!)",
}

# pydantic and yaml come with the manifest's schema (components/core); a phone's bundle of Python must hold them.
DEVICE_GRAPHS = {f"components/onnx/{name}.py" for name in ("runtime", "ort_head", "sessions")}
DEVICE_PACKAGES = {"numpy", "onnxruntime", "tokenizers", "pydantic", "yaml"}

PLACES = r"(^|[^A-Za-z0-9_.-])/(w[o]rk|f[a]rm|h[o]me|r[o]ot|U[s]ers)/"
REGISTRIES = r"https?://[^ /]*(p[y]pi|pythonh[o]sted|n[p]mjs|d[e]bian)"
LARGEST_FILE_BYTES = 500_000
LONGEST_FUNCTION_LINES = 60


def code(path: Path) -> str:
    return path.as_posix()


def device_modules() -> list[str]:
    """What runs on a device: the runtime, the decode loop, the benchmark."""
    return [
        name
        for name, path in project_modules().items()
        if code(path) in DEVICE_GRAPHS or code(path).startswith(("components/decoding", "components/devices"))
    ]


# --- who imports what ---------------------------------------------------------------------------------------------


def test_components_never_import_pipelines() -> None:
    wrong = [
        f"{path}: {found.name}"
        for path in project_modules().values()
        if path.parts[0] == "components"
        for found in imports_of(path)
        if found.name.partition(".")[0] == "pipelines"
    ]
    assert not wrong


def test_imports_follow_the_data() -> None:
    wrong = []
    for path in project_modules().values():
        if path.parts[0] != "components" or len(path.parts) < 3:
            continue
        folder = path.parts[1]
        for found in imports_of(path):
            parts = found.name.split(".")
            if parts[0] == "components" and len(parts) > 1 and parts[1] not in {folder, *MAY_IMPORT[folder]}:
                wrong.append(f"{path}: {found.name}")
    assert not wrong


def test_heavy_packages_are_imported_by_the_modules_whose_job_they_are() -> None:
    wrong = [
        f"{path}: {package}"
        for path in project_modules().values()
        for package in third_party(path)
        if package in HOMES and not re.fullmatch(HOMES[package], code(path))
    ]
    assert not wrong


def test_great_expectations_is_imported_inside_a_function_only() -> None:
    wrong = [
        f"{path}: {found.name}"
        for path in project_modules().values()
        for found in imports_of(path)
        if found.at_top and found.name.partition(".")[0] == "great_expectations"
    ]
    assert not wrong, "importing it costs seconds: do it where it is used"


def test_device_modules_need_no_torch_by_their_source() -> None:
    assert "components.onnx.runtime" in device_modules()
    modules = project_modules()
    wrong = {
        f"{start} -> {modules[name]}: {package}"
        for start in device_modules()
        for name in closure(start)
        for package in third_party(modules[name]) - DEVICE_PACKAGES
    }
    assert not wrong


def test_device_modules_load_no_torch_when_imported() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {device_modules()!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'mlflow', 'prefect', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_imported_package_is_a_declared_dependency() -> None:
    declared = {name for group in dependency_groups().values() for name in group}
    distributions = packages_distributions()
    wrong = [
        f"{path}: {package}"
        for path in project_modules().values()
        for package in third_party(path)
        if not declared & {normal(name) for name in distributions.get(package, [package])}
    ]
    assert not wrong


def test_temporary_files_lie_in_the_workspace() -> None:
    """The system's own folder may be small, or memory, and is not where anybody looks for what a killed run left."""
    wrong = [
        f"{path}:{node.lineno}"
        for path in project_modules().values()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call)
        and re.search(r"\b(TemporaryDirectory|\w*TemporaryFile|mkdtemp|mkstemp|gettempdir)$", ast.unparse(node.func))
        and "dir" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong


# --- how the code reads -------------------------------------------------------------------------------------------


def test_every_module_says_what_it_owns() -> None:
    assert not [str(path) for path in project_modules().values() if not ast.get_docstring(syntax_tree(path))]


def test_no_function_is_longer_than_a_screen() -> None:
    wrong = []
    for path in project_modules().values():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION_LINES:
                    wrong.append(f"{path}: {node.name} has {lines} lines")
    assert not wrong


# --- what git holds -----------------------------------------------------------------------------------------------


def test_no_large_file_is_tracked() -> None:
    assert not [str(path) for path in tracked_files() if (ROOT / path).stat().st_size > LARGEST_FILE_BYTES]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    pattern = re.compile(f"{PLACES}|{REGISTRIES}")
    wrong = []
    for path in tracked_files():
        text = (ROOT / path).read_bytes().decode("utf-8", errors="replace")
        wrong += [
            f"{path}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not wrong


@pytest.mark.parametrize(
    "line", ["see /" + "work/main", "x = '/" + "home/me/a'", "https://files." + "pythonhosted.org/x"]
)
def test_the_pattern_for_machines_and_registries_can_fail(line: str) -> None:
    assert re.search(f"{PLACES}|{REGISTRIES}", line)


# --- what is installed --------------------------------------------------------------------------------------------


def normal(name: str) -> str:
    """A distribution's name as the registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependency_groups() -> dict[str, set[str]]:
    """Names in pyproject.toml: the dependencies under "", then each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        group: {normal(re.split(r"[\s\[<>=!~;]", entry)[0]) for entry in entries} for group, entries in groups.items()
    }


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_has_a_pin() -> None:
    wanted = {name for group in dependency_groups().values() for name in group}
    assert not wanted - {normal(name) for name in pins()}


def test_a_pin_is_a_version_and_nothing_else() -> None:
    wrong = {name: version for name, version in pins().items() if not re.fullmatch(r"[0-9][0-9A-Za-z.]*", version)}
    assert not wrong, "no addresses, no local builds, no ranges"


def test_the_extras_are_there() -> None:
    assert {"dask", "ray", "dev"} <= set(dependency_groups())


def test_make_silences_the_same_telemetry_as_the_code() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert dict(re.findall(r"^export (\w+) \?= (\S+)$", makefile, flags=re.MULTILINE)) == QUIET_ENVIRONMENT


# --- what dvc.yaml declares ---------------------------------------------------------------------------------------


def overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def code_deps(stage: Stage) -> list[Path]:
    return [dep for dep in stage.deps if dep.parts[0] in ("components", "pipelines")]


# Plumbing shapes no stage's bytes: parameters are tracked by value, paths by name, and an error or a line of progress
# is no output. Counting it would retrain the head for a new line in the schema.
PLUMBING = {
    Path("components/core/config.py"),
    Path("components/core/errors.py"),
    Path("components/core/params.py"),
    Path("components/core/paths.py"),
    Path("components/core/progress.py"),
    Path("pipelines/stages/common.py"),
}


def code_files(stage: Stage) -> set[Path]:
    """Modules with code that a stage can load, plumbing left out."""
    loaded = {project_modules()[name] for name in closure(f"pipelines.stages.{stage.name}")}
    return {path for path in loaded - PLUMBING if holds_code(path)}


def test_every_stage_has_its_module_and_every_module_its_stage() -> None:
    modules = {path.stem for path in (ROOT / "pipelines/stages").glob("*.py")} - {"__init__", "common"}
    assert {stage.name for stage in stages()} == modules


def test_a_stage_runs_its_module() -> None:
    assert {stage.name: stage.cmd for stage in stages()} == {
        stage.name: f"python -m pipelines.stages.{stage.name}" for stage in stages()
    }


def test_every_module_that_a_stage_can_load_is_a_dependency() -> None:
    missing = {
        stage.name: sorted(
            str(path) for path in code_files(stage) if not any(path.is_relative_to(dep) for dep in code_deps(stage))
        )
        for stage in stages()
    }
    lines = [f"{name}: {path}" for name, files in missing.items() for path in files]
    assert not lines, "dvc.yaml lacks deps, the stage would not rerun when they change:\n" + "\n".join(lines)


def test_no_stage_depends_on_code_that_it_does_not_load() -> None:
    wrong = {
        f"{stage.name} needs no {dep}"
        for stage in stages()
        for dep in code_deps(stage)
        if not any(path.is_relative_to(dep) for path in code_files(stage))
    }
    assert not wrong, "dvc.yaml has deps that make a stage rerun for nothing"


def test_no_stage_can_decode_but_greedily() -> None:
    """Evidence that a gate reads comes from exact runs only: what changes the text is out of every stage's reach."""
    others = {f"components.decoding.{name}" for name in ("options", "relaxed", "sampling")}
    assert others <= set(project_modules())
    assert not {stage.name for stage in stages() if others & closure(f"pipelines.stages.{stage.name}")}


def test_stages_load_no_module_that_the_source_does_not_show() -> None:
    names = [f"pipelines.stages.{stage.name}" for stage in stages()]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*(n for n in sys.modules if n.partition('.')[0] in ('components', 'pipelines')))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) - {module for name in names for module in closure(name)}


def test_stages_stand_in_the_order_in_which_they_run() -> None:
    made: list[Path] = []
    for stage in stages():
        for dep in stage.deps:
            if (ROOT / dep).exists() and dep in {file for path in tracked_files() for file in (path, *path.parents)}:
                continue  # code, or a user's own file
            assert any(overlap(dep, out) for out in made), f"{stage.name} needs {dep}, which no earlier stage makes"
        made += stage.outs


def test_no_two_stages_write_the_same_place() -> None:
    outs = [(stage.name, out) for stage in stages() for out in stage.outs]
    wrong = [(a, b) for i, a in enumerate(outs) for b in outs[:i] if overlap(a[1], b[1])]
    assert not wrong


def test_every_output_is_a_path_of_the_core() -> None:
    known = {value for value in vars(paths).values() if isinstance(value, Path)}
    folders = {paths.CONTRACTS, paths.DATA_DOCS}  # one entry for each data contract

    def named(out: Path) -> bool:
        return out in known or out in {path.parent for path in known} or out.parent in folders

    assert not {f"{stage.name}: {out}" for stage in stages() for out in stage.outs if not named(out)}


def test_git_ignores_every_output() -> None:
    outs = [str(out) for stage in stages() for out in stage.outs]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *outs], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == set(outs), "else DVC writes .gitignore entries and the tree is dirty after a run"


def test_every_declared_parameter_exists() -> None:
    params = load_params(ROOT / "params.yaml").model_dump()
    for stage in stages():
        for key in stage.params:
            value = params
            for part in key.split("."):
                assert isinstance(value, dict) and part in value, f"{stage.name}: no parameter {key}"
                value = value[part]
