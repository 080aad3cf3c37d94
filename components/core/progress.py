"""Progress lines with an estimate of what is left, readable in a terminal and in a log."""

from __future__ import annotations

import sys
import time


class Progress:
    """Print ``label: done/total unit, rate, time left`` at most every ``every_s`` seconds and at the end.

    Plain lines, not a moving bar: DVC and CI logs keep them, and nothing is lost when output is piped.
    """

    def __init__(self, label: str, total: int, unit: str, every_s: float = 10.0) -> None:
        self.label, self.total, self.unit, self.every_s = label, total, unit, every_s
        self.started = self.last = time.monotonic()
        self.done = self.done_before = 0

    def resume_at(self, done: int) -> None:
        """Count ``done`` units as finished earlier, so that they do not flatter the rate."""
        self.done = self.done_before = done

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Count ``amount`` units as done and print when it is time."""
        self.done += amount
        now = time.monotonic()
        if now - self.last >= self.every_s or self.done >= self.total:
            self.last = now
            print(self.line(now, note), file=sys.stderr, flush=True)

    def line(self, now: float, note: str = "") -> str:
        """The line for time ``now`` (monotonic seconds)."""
        elapsed = max(now - self.started, 1e-9)
        rate = (self.done - self.done_before) / elapsed
        left_s = (self.total - self.done) / rate if rate > 0 else float("inf")
        left = f"{left_s:.0f} s left" if left_s < 90 else f"{left_s / 60:.0f} min left"
        ending = f"{elapsed:.0f} s in all" if self.done >= self.total else left
        return (
            f"{self.label}: {self.done}/{self.total} {self.unit}, {rate:.3g}/s, {ending}{', ' + note if note else ''}"
        )
