"""The schema of params.yaml: typed, strict, frozen.

Owns every default and every help text. Its one surprising decision: a stage gets a *view* of the parameters that holds
only the keys its dvc.yaml entry declares, so a key that is read but not tracked fails at once instead of going stale.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.core.errors import UserError

PARAMS_FILE = Path("params.yaml")
SPLITS = ("train", "validation", "test")
SLOT = re.compile(r"\{([a-z_]+)\}")

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Strict(BaseModel):
    """Base of every section: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Package(Strict):
    """One file from outside, pinned by version and content."""

    source: str = Field(description="pypi:NAME==VERSION, path:FOLDER or hub:OWNER/NAME")
    sha256: str | None = Field(default=None, description="sha256 of the downloaded wheel; required for pypi:")
    file: str | None = Field(default=None, description="path of the wanted file inside the wheel; required for pypi:")

    @model_validator(mode="after")
    def _pinned(self) -> Package:
        kind = self.source.partition(":")[0]
        if kind not in ("pypi", "path", "hub"):
            raise ValueError(f"source must start with pypi:, path: or hub:, not {self.source!r}")
        if kind == "pypi" and not (re.fullmatch(r"pypi:[\w.-]+==[\w.]+", self.source) and self.sha256 and self.file):
            raise ValueError("a pypi: source needs an exact ==version, a sha256 and a file")
        return self


class Corpora(Strict):
    """Public text from which prompts are built."""

    chat: Package
    misspellings: Package


class Task(Strict):
    """One thing a phone does with text; slots in {braces} are filled by the recipe."""

    recipe: Literal["notifications", "misspelt", "last_message", "jsonl"] = Field(description="who fills the slots")
    path: str | None = Field(default=None, description="JSONL file of slots; for recipe jsonl only")
    system: str | None = Field(default=None, description="system turn; none leaves it out")
    user: str = Field(description="user turn")
    answer_prefix: str = Field(default="", description="text put at the start of the answer")
    stop_texts: tuple[str, ...] = Field(default=(), description="the answer ends before any of these")
    max_new_tokens: Positive = Field(default=48, description="token budget of an answer")

    @model_validator(mode="after")
    def _path_with_jsonl(self) -> Task:
        if (self.recipe == "jsonl") != (self.path is not None):
            raise ValueError("`path` goes with `recipe: jsonl`, and only with it")
        if any(not text for text in self.stop_texts):
            raise ValueError("a stop text must not be empty")
        return self

    def slots(self) -> tuple[str, ...]:
        """Names of the slots that the template uses, in order of appearance, once each."""
        return tuple(dict.fromkeys(SLOT.findall(f"{self.system or ''}{self.user}{self.answer_prefix}")))


class SplitSizes(Strict):
    """Prompts of one task in each split."""

    train: Positive
    validation: Positive
    test: Positive


class Data(Strict):
    """How prompts are built and split."""

    seed: int
    prompts_per_task: SplitSizes
    max_prompt_tokens: Positive = Field(description="longer prompts are left out")
    deduplicate_ngram: Positive = Field(
        description="test prompts sharing a run of so many words with training are left out"
    )


class Distil(Strict):
    """Greedy decoding of the backbone with continuous batching, and capture of what the head reads."""

    chunk_prompts: Positive = Field(description="prompts of one shard at most; a killed run loses one per process")
    slots: Positive = Field(description="prompts that one process decodes at once")
    equality_prompts: Positive = Field(description="training prompts decoded singly as well, to measure near-ties")


class Head(Strict):
    """Shape of the MTP head."""

    kv_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        min_length=1, description="backbone layer read by each head layer"
    )
    intermediate_size: Positive
    draft_vocabulary_size: Positive


class Train(Strict):
    """How the head is trained."""

    seed: int
    draft_length: Annotated[int, Field(ge=1, le=7)] = Field(description="K: steps unrolled in training")
    step_weights: tuple[Annotated[float, Field(gt=0)], ...] = Field(description="loss weight of each step")
    soft_target_weight: Share = Field(description="share of the loss to the backbone's distribution, not its choice")
    epochs: Positive
    batch_sequences: Positive
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_share: Share
    weight_decay: Annotated[float, Field(ge=0)]
    clip_norm: Annotated[float, Field(gt=0)]
    validate_prompts_per_task: Positive = Field(description="validation prompts decoded live after each epoch")
    patience: Positive = Field(description="epochs in a row without better live acceptance that end the run")
    processes: Positive = Field(description="that make each step together; batches and threads are divided")

    @model_validator(mode="after")
    def _weights_match(self) -> Train:
        if len(self.step_weights) != self.draft_length:
            raise ValueError(f"step_weights needs {self.draft_length} values, one per draft step")
        return self


class Runtime(Strict):
    """How a bundle decodes."""

    threads: Annotated[int, Field(ge=0)] = Field(description="0: every core the process may use")
    max_length: Positive = Field(description="rows of the KV buffer: prompt and answer together")
    oldest_onnxruntime: str = Field(description="the oldest runtime that must load the graphs")


class Drafting(Strict):
    """What the draft policy is chosen from, and the costs that it is chosen by."""

    longest: Annotated[int, Field(ge=1, le=7)] = Field(description="drafts of a round at most; a pass has one row more")
    thresholds: tuple[Share, ...] = Field(min_length=1, description="the head stops once its chain is less likely")
    lookup_ngrams: tuple[Positive, ...] = Field(min_length=1, description="tokens that must have occurred before")
    pass_cost: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        description="passes of 1, 2, .. longest+1 rows, in decode passes; `costs` in benchmark/local.json measures them"
    )
    step_cost: Annotated[float, Field(gt=0)] = Field(description="one step of the head, in decode passes")

    @model_validator(mode="after")
    def _a_cost_per_width(self) -> Drafting:
        if len(self.pass_cost) != self.longest + 1:
            raise ValueError(f"pass_cost needs {self.longest + 1} values, one per pass width")
        return self


class Evaluate(Strict):
    """Live evaluation of the head with torch on the test split."""

    prompts_per_task: Positive
    seed: int
    bootstrap_samples: Positive


class Verify(Strict):
    """Token-exact comparison inside the bundle."""

    prompts_per_task: Positive


class Benchmark(Strict):
    """Interleaved timing of plain greedy, MTP and prompt lookup."""

    prompts_per_task: Positive
    rounds: Positive = Field(description="times each prompt is timed in each mode")
    warmup_prompts: Positive
    lookup_draft_length: Annotated[int, Field(ge=1, le=7)]
    lookup_ngram: Positive


class Standalone(Strict):
    """Shape of the standalone baseline, a small Llama over the head's draft vocabulary."""

    layers: Positive
    hidden_size: Positive
    intermediate_size: Positive
    heads: Positive = Field(description="attention heads; each has keys and values of its own")


class Compare(Strict):
    """Baselines on the head's own answers, with the settings and epochs of section `train`."""

    seed: int
    prompts_per_task: Positive
    standalone: Standalone
    finetune_epochs: Positive = Field(description="more epochs of the standalone drafter, on one task's answers each")
    medusa_blocks: Positive = Field(description="residual blocks in each of the K towers")
    prompt_lengths: tuple[Positive, ...] = Field(min_length=1, description="prompts timed to the first draft")
    timing_repeats: Positive


class Gates(Strict):
    """Floors that a release must meet; those on extra tokens by the default mode and by the head alone."""

    exact_match: Share
    extra_tokens_per_pass_overall: float
    extra_tokens_per_pass_task: float
    speedup_overall: float
    speedup_task: float


class Registry(Strict):
    """Where runs and released models are kept."""

    tracking_uri: str = Field(description="sqlite:///PATH, relative to the project, or a server")
    artifact_root: str = Field(description="folder of artifacts for a sqlite store")
    experiment: str
    model_name: str


class Params(Strict):
    """All of params.yaml."""

    backbone: Package
    corpora: Corpora
    tasks: dict[str, Task] = Field(min_length=1)
    data: Data
    distil: Distil
    head: Head
    train: Train
    runtime: Runtime
    drafting: Drafting
    evaluate: Evaluate
    verify: Verify
    benchmark: Benchmark
    compare: Compare
    gates: Gates
    registry: Registry

    @field_validator("tasks")
    @classmethod
    def _task_names(cls, tasks: dict[str, Task]) -> dict[str, Task]:
        for name in tasks:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                raise ValueError(f"task name {name!r}: use lower-case letters, digits and _")
        return tasks

    @model_validator(mode="after")
    def _draft_lengths(self) -> Params:
        longest = self.data.max_prompt_tokens + max(task.max_new_tokens for task in self.tasks.values())
        if longest + self.drafting.longest + 1 > self.runtime.max_length:
            raise ValueError(f"runtime.max_length {self.runtime.max_length} cannot hold {longest} tokens and a draft")
        return self


def _first_problem(error: ValidationError) -> tuple[str, str]:
    # A misspelt key is unknown and leaves another one missing: what was written is named, not what was meant.
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    kinds = {"extra_forbidden": "unknown key", "missing": "missing key"}
    seen = kinds.get(problem["type"], problem["msg"])
    if "input" in problem and problem["type"] not in ("missing",):
        seen += f" (value {str(problem['input'])[:60]!r})"
    return where, seen


def parse_params(document: Any, name: str = "params.yaml") -> Params:
    """Validate a parsed document.

    Raises:
        UserError: names the first wrong key.
    """
    try:
        return Params.model_validate(document)
    except ValidationError as error:
        where, seen = _first_problem(error)
        count = error.error_count()
        more = f", and {count - 1} more" if count > 1 else ""
        raise UserError(f"{name} is not valid: {where}{more}", seen, f"correct `{where}` in {name}") from None


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate the parameter file.

    Raises:
        UserError: missing, not YAML, or not valid.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing", f"no such file in {Path.cwd()}", "run from the project folder") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML", str(error), f"correct {path}, or `git checkout {path}`") from None
    return parse_params(document, str(path))


class ParamsView:
    """A read-only view that lets through declared keys only.

    Args:
        section: a (part of) validated parameters.
        allowed: dotted keys below ``section`` that may be read; a section's name allows all of it.
    """

    def __init__(self, section: Strict, allowed: frozenset[str], prefix: str = "") -> None:
        self._section, self._allowed, self._prefix = section, allowed, prefix

    def __getattr__(self, name: str) -> Any:
        key = f"{self._prefix}{name}"
        value = getattr(self._section, name)
        if key in self._allowed:
            return value
        if any(other.startswith(f"{key}.") for other in self._allowed):
            return ParamsView(value, self._allowed, f"{key}.")
        raise KeyError(f"parameter {key} is read but not declared for this stage in dvc.yaml")
