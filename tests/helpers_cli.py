"""What a person sees of a fault, for every test of one."""

from __future__ import annotations

from dataclasses import dataclass

STARTS = ["error: ", " seen: ", " next: "]


def three_lines(shown: str) -> list[str]:
    """What is wrong, what was seen, what to type next; ``shown`` must hold exactly these three lines."""
    lines = shown.splitlines()
    assert [line[:7] for line in lines] == STARTS, shown
    return [line[7:] for line in lines]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def told(self) -> list[str]:
        """The three lines of a user's fault, which ends with 2."""
        assert self.code == 2, self
        return three_lines(self.err)
