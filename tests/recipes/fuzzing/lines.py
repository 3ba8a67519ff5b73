"""Command lines at random: a tiny run that works, a few flags more, and a preset of any kind."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from fuzzing.presets import CHAOS, as_yaml
from fuzzing.values import FLAGS, SHAPES, Values

Given = list[tuple[str, str | None]]
SELDOM = 1 / 6
SHORT = {"global_batch_size": "4", "max_steps": "1", "report_to": "none", "output_dir": "run"}
TEXTS = {"train_file": "f/text.jsonl", "block_size": "16"}
LABELLED = {"train_file": "f/labelled.csv", "validation_file": "f/labelled.csv"}
LABELLED |= {"max_length": "16"}


def _from_scratch(model_type: str) -> dict[str, str]:
    return {"model_type": model_type, "config_overrides": SHAPES[model_type]}


BASES: dict[str, list[dict[str, str]]] = {
    "image_classification": [
        {"model": "vgg_small", "image_size": "16", "data_dir": "f/images"},
        {**_from_scratch("vit"), "image_size": "16", "data_dir": "f/images"},
        {"model": "vgg_small", "image_size": "8", "dataset": "digits"},
    ],
    "language_modeling": [{**_from_scratch("gpt2"), **TEXTS}, {"model_name_or_path": "f/small", **TEXTS}],
    "text_classification": [{**_from_scratch("bert"), **LABELLED}, {"model_name_or_path": "f/small", **LABELLED}],
}
"""Tiny runs of each recipe."""


@dataclass
class Line:
    """A command line and what is known of it.

    Args:
        program: a recipe, or ``memsave``.
        words: of the command line.
        preset: what ``preset.yaml`` holds; ``None`` for no such file.
        on_a_run: ``--output_dir`` is there already and holds a run.
        asked: for every flag the last value that was given, as it was typed.
        refused: something in it can never be accepted.
        codes: in which it may end, beside 0 and 2.
    """

    program: str
    words: list[str] = field(default_factory=list)
    preset: bytes | None = None
    on_a_run: bool = False
    asked: dict[str, str | None] = field(default_factory=dict)
    refused: bool = False
    codes: set[int] = field(default_factory=set)

    def give(self, flag: str, value: str | None, *, dashed: bool = False, joined: bool = False) -> None:
        """``--flag value``, ``--flag=value``, or with dashes in the flag; ``None`` gives the flag alone."""
        name = f"--{flag.replace('_', '-') if dashed else flag}"
        if value is None:
            self.words.append(name)
        else:
            self.words += [f"{name}={value}"] if joined else [name, value]
        self.asked[flag] = value

    def judge(self, flags: dict[str, Values]) -> None:
        """Set ``refused`` and ``codes`` by the values that hold in the end."""
        for flag, value in self.asked.items():
            known = flags.get(flag, Values())
            self.refused |= value in known.bad or value in known.words
            self.codes |= set(known.codes)


def recipe_line(program: str, random: Random, text: str) -> Line:
    """A recipe with its tiny run, and more; ``text`` is what anyone might type."""
    flags = FLAGS[program]
    line = Line(program, on_a_run=program == "image_classification" and _is_seldom(random))
    base = random.choice(BASES[program]) | SHORT
    more = some_of(random, flags, "good", most=4)
    if random.random() < 0.5:
        more += some_of(random, flags, "odd", "odd", "bad", "bad", "words", most=2)
    given = [*base.items(), *((flag, _within(base, flag, value)) for flag, value in more)]
    if _is_seldom(random):
        given = _move_to_preset(line, random, given)
    for flag, value in given:
        line.give(flag, value, dashed=_is_seldom(random), joined=_is_seldom(random))
    line.judge(flags)
    if _is_seldom(random):
        line.words += _nonsense(random, flags, text)
        line.refused = True
    return line


def some_of(random: Random, flags: dict[str, Values], *kinds: str, most: int) -> Given:
    """Up to ``most`` flags, each with a value of one of the ``kinds``."""
    values = {flag: [found for kind in kinds if (found := getattr(known, kind))] for flag, known in flags.items()}
    usable = [flag for flag in values if values[flag]]
    chosen = random.sample(usable, random.randint(0, min(most, len(usable))))
    return [(flag, random.choice(random.choice(values[flag]))) for flag in chosen]


def _is_seldom(random: Random) -> bool:
    return random.random() < SELDOM


def _within(base: dict[str, str], flag: str, value: str | None) -> str | None:
    """An odd shape as a change of the tiny one, which must stay tiny."""
    is_odd = flag == "config_overrides" and flag in base and value and "=" in value.strip("=,")
    return f"{base[flag]},{value}" if is_odd else value


def _move_to_preset(line: Line, random: Random, given: Given) -> Given:
    """Some of them; returns the others, which count more."""
    moved = {flag: value for flag, value in given if value and value.isprintable() and random.random() < 0.5}
    kept = [(flag, value) for flag, value in given if moved.get(flag) != value]
    line.words += random.choice([["--config", "preset.yaml"], ["--config=preset.yaml"]])
    line.asked |= moved
    lines = [as_yaml(flag, value, is_quoted=random.random() < 0.5) for flag, value in moved.items()]
    if random.random() < 0.5:
        chaos = random.choice(CHAOS)
        lines.insert(random.randint(0, len(lines)), chaos.text)
        line.asked |= chaos.asked
        line.refused |= chaos.refused
    line.preset = b"".join(lines)
    return kept


def _nonsense(random: Random, flags: dict[str, Values], text: str) -> list[str]:
    """Words that no recipe knows."""
    flag = random.choice(list(flags))
    misspelled = random.choice([f"--{name}" for name in (flag[:-1], f"{flag}s", flag[1:]) if name not in flags])
    no_file = random.choice(["absent", "f/folder.yaml", "f/bytes.yaml", "\udcff", ""])
    wrong = [[misspelled, "1"], ["--config", no_file], ["--seed=1", text.lstrip("-")]]
    wrong += [["word"], [""], ["-x"], ["--"], ["--=3"], ["--config"], ["--config", "f/empty.yaml"] * 2]
    return random.choice(wrong)


def single_lines(program: str) -> Iterator[Line]:
    """Every ``bad`` and ``odd`` value of every flag by itself, beside a tiny run."""
    for flag, known in FLAGS[program].items():
        for value in (*known.bad, *known.odd):
            base = next((base for base in BASES[program] if flag in base), BASES[program][0]) | SHORT
            line = Line(program)
            for given in (*base.items(), (flag, _within(base, flag, value))):
                line.give(*given)
            line.judge(FLAGS[program])
            yield line
