"""Stage `prompts`: fill the task templates from the corpora, split, and write the prompt table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from components.core.config import Task
from components.core.errors import UserError, exits_cleanly
from components.core.manifest import TaskPrompt
from components.core.paths import BACKBONE, PROMPTS, RAW_CHAT, RAW_MISSPELLINGS, TEMPLATES
from components.data.corpora import load_chats, load_misspellings
from components.data.prompts import Corpus, build_prompts
from components.data.recipes import first_names
from components.data.table import write_prompts, write_templates
from components.data.template import encode_prompt, render_prompt
from pipelines.stages.common import stage_params


def render_tasks(backbone: Path, tasks: Mapping[str, Task]) -> dict[str, TaskPrompt]:
    """Each task's template with the backbone's chat template applied.

    Raises:
        UserError: the backbone folder holds no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        chat_template = AutoTokenizer.from_pretrained(backbone, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{backbone} holds no tokenizer", str(error).splitlines()[0], "run `mtp repro backbone`"
        ) from None
    return {
        name: TaskPrompt(
            rendered=render_prompt(chat_template, task),
            answer_prefix=task.answer_prefix,
            choices=task.choices,
            stop_texts=task.stop_texts,
            max_new_tokens=task.max_new_tokens,
        )
        for name, task in tasks.items()
    }


@exits_cleanly
def main() -> None:
    """Write templates.json and prompts.parquet."""
    params = stage_params("prompts")
    templates = render_tasks(BACKBONE, params.tasks)
    tokenizer = Tokenizer.from_file(str(BACKBONE / "tokenizer.json"))
    corpus = Corpus(load_chats(RAW_CHAT), load_misspellings(RAW_MISSPELLINGS), first_names())

    def encode(task: str, slots: Mapping[str, str]) -> list[int]:
        return encode_prompt(tokenizer, templates[task].rendered, slots)

    prompts = build_prompts(params.tasks, params.data, corpus, encode)
    write_templates(TEMPLATES, templates)
    write_prompts(PROMPTS, prompts)
    for (task, split), count in Counter((prompt.task, prompt.split) for prompt in prompts).items():
        print(f"prompts: {task} {split}: {count}")


if __name__ == "__main__":
    main()
