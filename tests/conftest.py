"""Small but real parts for every test: a random Llama with a byte-pair tokenizer and a chat template, and a head.

Built once per session; tests must not write into the folders these fixtures return.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.core.host import set_quiet_environment

ROOT = Path(__file__).resolve().parent.parent

set_quiet_environment()
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def share_bytecode() -> None:
    """Let the processes that tests start share compiled modules, in pytest's own folder, where nothing may be written
    beside the source: compiling torch, MLflow and Great Expectations anew is half of what every such process costs."""
    if sys.dont_write_bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".pytest_cache/bytecode")


share_bytecode()

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LETTERS = "the cat sat on the mat and i has went to the store yesterday to buy milk, bread and a red hat for anna."


LONGEST_FILES = ("test_end_to_end", "test_flows")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers take whole files in this order: the longest first, so that none works alone at the end. (In it,
    Prefect's servers of the two are minutes apart: two that started at once could choose the same port.)"""
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        order = {name: number for number, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def teach(model: Any, lessons: list[list[int]], answer: int, steps: int = 240) -> None:
    """Next-token training on the last ``answer`` tokens of each lesson, a few seconds."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps if lessons else 0):
        batch = [lessons[(step * 8 + row) % len(lessons)][-96:] for row in range(8)]
        shortest = min(len(lesson) for lesson in batch)
        ids = torch.tensor([lesson[-shortest:] for lesson in batch])
        optimizer.zero_grad()
        labels = ids.clone()
        labels[:, :-answer] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def write_tiny_backbone(folder: Path, lessons: Sequence[str] = (), answer: str = "") -> None:
    """A Llama (hidden 64, 4 layers, 4 query and 2 kv heads of 16) in the format of ``models/backbone``.

    Random, or taught ``lessons`` that end with ``answer``, so that what it writes can be guessed by a head.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from components.core.config import Package
    from components.modeling.backbone import import_backbone

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LETTERS] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.05 if lessons else 0.2,
    )
    plain = folder.with_name(f"{folder.name}-source")
    model = LlamaForCausalLM(config)
    teach(model, [tokenizer.encode(lesson).ids for lesson in lessons], len(tokenizer.encode(answer).ids))
    model.save_pretrained(plain)
    fast.save_pretrained(plain)
    import_backbone(Package(source=f"path:{plain}"), folder)


@pytest.fixture(scope="session")
def tiny_backbone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in the format of ``models/backbone``; random weights, so greedy text is noise but deterministic."""
    folder = tmp_path_factory.mktemp("tiny") / "backbone"
    write_tiny_backbone(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_head_dir(tiny_backbone_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head for the tiny backbone, reading its layers 1 and 2."""
    from components.core.config import Head
    from components.modeling.backbone import load_backbone
    from components.modeling.training import new_head

    shape = Head(kv_layers=(1, 2), intermediate_size=128, draft_vocabulary_size=200)
    folder = tmp_path_factory.mktemp("tiny") / "head"
    new_head(shape, load_backbone(tiny_backbone_dir), [], seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def backbone(tiny_backbone_dir: Path) -> Any:
    """The tiny backbone as everything but distillation loads it, anew for each module: tests may set its attributes."""
    from components.modeling.backbone import load_backbone

    return load_backbone(tiny_backbone_dir)


@pytest.fixture(scope="module")
def decode(tiny_backbone_dir: Path) -> Any:
    """Token ids of the tiny backbone to text."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_backbone_dir / "tokenizer.json")).decode
