"""What a user may ask of decoding, by name: the one door between requests and decoding rules.

Owns names, types and ranges, for the command line and for whoever serves a bundle. It refuses every name that it does
not know, because an option that is silently left out changes the text as surely as a wrong one: penalties, biases,
beams, top-k and minimum lengths are not part of the draft loop. Its surprising decision: a name is refused whatever
its value, also one that would change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.core.errors import UserError
from components.decoding.loop import Rule
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling


class Options(BaseModel):
    """Decoding options; all of them may be left out, which is greedy decoding."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="share of probability that is sampled from")
    seed: int = Field(default=0, ge=0, description="for sampling; same seed, same text")
    relaxed: float | None = Field(default=None, gt=0.0, description="margin in logits; not exact")

    @model_validator(mode="after")
    def _go_together(self) -> Options:
        if self.relaxed is not None and self.temperature > 0:
            raise ValueError("relaxed acceptance is for greedy decoding: it cannot go with a temperature")
        if self.top_p < 1 and "temperature" not in self.model_fields_set:
            raise ValueError("top_p without temperature would do nothing: name a temperature too")
        if "seed" in self.model_fields_set and "temperature" not in self.model_fields_set:
            raise ValueError("seed without temperature would do nothing: name a temperature too")
        return self

    @property
    def rule(self) -> Rule:
        """The decoding rule that they ask for."""
        if self.relaxed is not None:
            return Relaxed(self.relaxed)
        return Sampling(self.temperature, self.top_p, self.seed)  # greedy at temperature 0


def check_options(given: Mapping[str, object]) -> Options:
    """Check what was asked for.

    Args:
        given: option names and values, as the user gave them.

    Raises:
        UserError: names every option that is not supported, or the first value that is wrong.
    """
    unknown = [name for name in given if name not in Options.model_fields]
    supported = ", ".join(Options.model_fields)
    if unknown:
        raise UserError(
            f"not supported in decoding: {', '.join(unknown)}",
            ", ".join(f"{name}={given[name]!r}" for name in unknown)[:200],
            f"leave that out; supported: {supported}",
        )
    try:
        return Options.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            seen = ", ".join(f"{name}={value}" for name, value in given.items())
            raise UserError(message, seen, "change one of them") from None
        name = str(problem["loc"][0])
        raise UserError(f"{name} is not valid", f"{problem['input']!r}"[:200], f"correct {name}: {message}") from None
