"""Flags as fields of a dataclass: the help of each, the values that it takes, and what a resumed run may change."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from memsave_recipes.core.errors import require


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the field of a flag says besides its help.

    Args:
        shown: ``first`` or ``seldom``, the first or the last group of ``--help``; else it is in that of its dataclass.
        least: the least number that the flag takes.
        within: the numbers that it takes, as an interval such as ``[0, 1)``.
        resume: what a run that goes on may change. ``free``: anything, no weight depends on it; ``length``: anything
            under a schedule without an end; ``place``: a path, whose content is trusted to be the same; ``chosen``:
            nothing, and ``auto`` is what the run began with; ``None``: nothing.
        rounds: why another value changes no more than rounding does, so that a run that goes on may change it.
        before: how runs of an earlier version were trained, which did not have the flag; ``None``: none were.
        same: values that give the same bits.
        file_of: the flag whose file holds what this field has.
    """

    shown: Literal["first", "seldom"] | None = None
    least: float | None = None
    within: str | None = None
    resume: Literal["free", "length", "place", "chosen"] | None = None
    rounds: str | None = None
    before: Any = None
    same: tuple[Any, ...] = ()
    file_of: str | None = None

    @property
    def range(self) -> str:
        """The numbers that the flag takes, in words."""
        return f"at least {self.least}" if self.within is None else f"in {self.within}"

    def takes(self, number: float) -> bool:
        """Return whether ``number`` is one of them."""
        if self.within is None:
            return self.least is None or number >= self.least
        low, high = map(float, self.within[1:-1].split(","))
        above = low <= number if self.within.startswith("[") else low < number
        return above and (number <= high if self.within.endswith("]") else number < high)


RULES = "rules"
OF_RULES = {field.name for field in fields(Rules)}


def option(default: Any, help: str, **more: Any) -> Any:
    """Make the field of a flag.

    Args:
        default: or what makes it, such as ``list``.
        more: fields of its ``Rules``; others are arguments of argparse, such as ``nargs``.
    """
    rules = Rules(**{name: more.pop(name) for name in OF_RULES & more.keys()})
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"help": help, RULES: rules, **more})


def rules_of(flags: type) -> dict[str, Rules]:
    """Return the rules of each flag by name: of the dataclass that first declares it, whatever subclasses change."""
    found: dict[str, Rules] = {}
    for part in reversed(flags.__mro__):
        for name, flag in vars(part).get("__dataclass_fields__", {}).items():
            found.setdefault(name, flag.metadata.get(RULES, Rules()))
    return found


def check_ranges(flags: Any) -> None:
    """Raise ``InputError`` for a number of a dataclass of flags that its rules do not take."""
    for name, rules in rules_of(type(flags)).items():
        value = getattr(flags, name)
        if isinstance(value, int | float):
            require(rules.takes(value), f"--{name}", value, rules.range)
