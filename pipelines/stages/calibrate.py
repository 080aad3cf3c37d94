"""Stage `calibrate`: choose how far to draft, by replaying the head's drafts on the validation answers."""

from __future__ import annotations

from functools import partial

import torch
from tokenizers import Tokenizer

from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.core.host import host_card, resolve_threads
from components.core.manifest import DraftPolicy
from components.core.paths import BACKBONE, FEATURES, HEAD, POLICY, PROMPTS, TEMPLATES
from components.data.table import read_prompts, read_templates
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.calibration import Score, Trace, calibrate, record, replay
from components.modeling.features import read_shards
from components.modeling.head import MTPHead
from pipelines.stages.common import stage_params


def record_traces(backbone: Backbone, longest: int) -> list[Trace]:
    """The head's drafts at every position of the validation answers."""
    head = MTPHead.from_pretrained(HEAD)
    tasks = {prompt.prompt_id: prompt.task for prompt in read_prompts(PROMPTS) if prompt.split == "validation"}
    found = [sequence for sequence in read_shards(FEATURES) if sequence.prompt_id in tasks and len(sequence.answer) > 1]
    return [record(head, backbone, sequence, tasks[sequence.prompt_id], longest) for sequence in found]


@exits_cleanly
def main() -> None:
    """Write policy.json."""
    params = stage_params("calibrate")
    settings, threads = params.drafting, resolve_threads(params.runtime.threads)
    torch.set_num_threads(threads)
    backbone = load_backbone(BACKBONE)
    traces, templates = record_traces(backbone, settings.longest), read_templates(TEMPLATES)
    decode = partial(Tokenizer.from_file(str(BACKBONE / "tokenizer.json")).decode, skip_special_tokens=True)

    def score(task: str, policy: DraftPolicy) -> Score:
        return replay([t for t in traces if t.task == task], policy, templates, backbone.card.eos_ids, decode, settings)

    chosen = calibrate(score, sorted({trace.task for trace in traces}), settings)
    created = host_card("torch").as_dict() | {
        "threads": threads,
        "precision": "float32",
        "source": "replay of validation answers",
    }
    write_json(POLICY, {"created_with": created, "answers": len(traces), **chosen})
    best = chosen["policies"]["default"]
    print(f"calibrate: {best} pays best, {chosen['policies']['modes'][best]}")


if __name__ == "__main__":
    main()
