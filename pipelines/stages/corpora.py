"""Stage `corpora`: fetch the public text that prompts are built from."""

from __future__ import annotations

from components.core.errors import exits_cleanly
from components.core.paths import RAW_CHAT, RAW_MISSPELLINGS
from components.data.corpora import load_chats, load_misspellings
from components.data.sources import fetch_file
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Fetch both corpora and read them once, so that a wrong file is found here and not three stages on."""
    params = stage_params("corpora")
    fetch_file(params.corpora.chat, RAW_CHAT)
    fetch_file(params.corpora.misspellings, RAW_MISSPELLINGS)
    chats, misspellings = load_chats(RAW_CHAT), load_misspellings(RAW_MISSPELLINGS)
    messages = sum(len(chat.messages) for chat in chats)
    print(f"corpora: {len(chats)} chats with {messages} messages, {len(misspellings)} misspelt words")


if __name__ == "__main__":
    main()
