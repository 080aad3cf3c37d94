"""Errors a user can cause, told in three lines.

Owns the one exception type that the command line and the stages turn into exit code 2. It refuses to hide
anything else: a bug keeps its traceback.
"""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

EXIT_USER_ERROR = 2
P = ParamSpec("P")


class UserError(Exception):
    """A fault that the person at the keyboard can mend.

    Args:
        what: what is wrong, one line.
        seen: what was found instead, one line.
        do: what to type or change next, one line.
    """

    def __init__(self, what: str, seen: str, do: str) -> None:
        self.what, self.seen, self.do = (" ".join(str(part).split()) for part in (what, seen, do))
        super().__init__(self.render())

    def render(self) -> str:
        """The three lines as printed."""
        return f"error: {self.what}\n seen: {self.seen}\n next: {self.do}"


def disk_full(error: OSError) -> UserError:
    """Turn ENOSPC / EDQUOT into three lines naming the file."""
    return UserError(
        "the disk is full; nothing finished was lost",
        f"{error.strerror} while writing {error.filename or 'a file of this stage'}",
        "free some space (df -h .), then run the same command again",
    )


def says_disk_full(text: str) -> bool:
    """Whether a message of the system or of a library is about a full disk."""
    return any(sign in text.lower() for sign in ("no space left on device", "disk is full", "os error 28"))


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error``, or anything it was raised from, says that the disk is full.

    Libraries (safetensors, pyarrow, SQLite) wrap the system's error in types of their own, so the text counts too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if says_disk_full(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def exits_cleanly(main: Callable[P, None]) -> Callable[P, None]:
    """Decorate an entry point: UserError and a full disk become three lines on stderr and exit code 2."""

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            print(error.render(), file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None
        except Exception as error:
            if not is_disk_full(error):
                raise
            shown = error if isinstance(error, OSError) else OSError(errno.ENOSPC, "No space left on device")
            print(disk_full(shown).render(), file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None

    return wrapped
