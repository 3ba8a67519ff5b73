"""The figures of docs/will_it_fit.html: what `memsave fit` says of models on twelve cards.

    python benchmarks/fit_page.py                       # what the page lacks; it goes on where it was interrupted
    python benchmarks/fit_page.py --model "GPT-2" --again

Each answer is what `memsave fit MODEL --card CARD --json FILE` writes, made by the command itself. Its estimates are
made once for all cards with the same kernels: bytes do not depend on the card, and seconds are carried for all cards at
once. `--length` adds answers for rows of another length. A model is put into the page as soon as it is done. Models of
images and text need what their processors do, such as torchvision.
"""

import io
import json
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from math import ceil
from time import perf_counter
from typing import Any

import harness
import known_models
import torch
import transformers

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs import estimate
from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.planner.search import Candidate, SearchSpace
from memsave_recipes.core.planner.task import Launch, Task
from memsave_recipes.core.text import GIB, MIB
from memsave_recipes.tools import cli
from memsave_recipes.tools.cli import fit
from memsave_recipes.tools.cli.flags import STDOUT, recipes_folder
from memsave_recipes.tools.fit import ladder
from memsave_recipes.tools.fit.ladder import KnownEstimates
from memsave_recipes.tools.fit.subject import LANGUAGE

PAGE = harness.ROOT / "docs" / "will_it_fit.html"
FIGURES = re.compile(r'(?<=<script type="application/json" id="figures">\n).*?(?=</script>)', re.S)
CARDS = (
    *("rtx4060", "rtx3060", "t4", "rtx4060ti-16gb", "l4", "rtx4090"),
    *("rtx5090", "a100-40gb", "l40s", "a100-80gb", "h100", "h200"),
)
HOSTS_GIB = (None, 64)
"""Memory of the host: enough, as ``memsave fit`` takes it by default, or so much."""

MODEL_WORD, MICRO, BUDGET = "MODEL", "MICRO", "BUDGET"
"""Stand for the values of a launch line that differ from answer to answer."""


class OfEach(tuple[float, ...]):
    """Seconds, or rates, on each of several cards: numbers that are computed with as one."""

    def _with(self, other: Any, combine: Callable[[float, float], float]) -> "OfEach":
        others = other if isinstance(other, OfEach) else (other,) * len(self)
        return OfEach(map(combine, self, others))

    def __add__(self, other: Any) -> "OfEach":  # type: ignore[override]
        return self._with(other, lambda mine, its: mine + its)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "OfEach":
        return self._with(other, lambda mine, its: mine - its)

    def __mul__(self, other: Any) -> "OfEach":  # type: ignore[override]
        return self._with(other, lambda mine, its: mine * its)

    def __rtruediv__(self, other: Any) -> "OfEach":
        return self._with(other, lambda mine, its: its / mine)


def later(first: Any, second: Any) -> Any:
    """The later of two times, on each card where there are several."""
    if isinstance(first, OfEach):
        return first._with(second, max)
    return second._with(first, max) if isinstance(second, OfEach) else max(first, second)


@dataclass(frozen=True, kw_only=True)
class Cards(Target):
    """Cards with the same kernels, as one target: its seconds and rates are ``OfEach``."""

    targets: tuple[Target, ...]

    @classmethod
    def of(cls, targets: Sequence[Target]) -> "Cards":
        """Those of ``targets``, which the estimates of a trace do not tell apart but by their rates."""
        first = {field.name: getattr(targets[0], field.name) for field in fields(Target)}
        first["host_bytes_per_s"] = OfEach(target.host_bytes_per_s for target in targets)
        return cls(**first, targets=tuple(targets))

    @property
    def calibrated(self) -> "Cards":
        """Those with the rates that kernels reach."""
        return Cards.of([target.calibrated for target in self.targets])

    def seconds(self, operation: Any, dtype: torch.dtype, flops: float, num_bytes: int, extent: float = 0.0) -> Any:
        """The time of an operator on each card."""
        return OfEach(target.seconds(operation, dtype, flops, num_bytes, extent) for target in self.targets)


def kernels_of(target: Target) -> tuple[bool, ...]:
    """What the trace of a step depends on."""
    return "bfloat16" in target.flops_per_s, target.has_flash_attention, target.has_varlen_attention


class SharedEstimates:
    """Makes ``KnownEstimates`` whose costs are estimated once for all ``CARDS`` with the same kernels.

    ``read`` takes the place of a page's: a task is read once, whatever the card's budget.
    """

    def __init__(self) -> None:
        self._targets = [find_target(word) for word in CARDS]
        self._tasks: dict[tuple[str, ...], Task] = {}
        self._flags: dict[int, tuple[str, ...]] = {}
        self._estimates: dict[Hashable, KnownEstimates] = {}

    def read(self, page: Any, flags: Sequence[str]) -> Task:
        """The task of a page under further flags."""
        key = (*page.flags, *flags)
        if key not in self._tasks:
            self._tasks[key] = _READ(page, flags)
            self._flags[id(self._tasks[key])] = key
        return self._tasks[key]

    def of(self, task: Task, launch: Launch, on_estimate: Callable[[str], object]) -> KnownEstimates:
        """``KnownEstimates`` of a task for one card."""
        key = self._flags[id(task)], kernels_of(launch.target)
        if key not in self._estimates:
            alike = [target for target in self._targets if kernels_of(target) == key[1]]
            self._estimates[key] = KnownEstimates(task, replace(launch, target=Cards.of(alike)), on_estimate)
        return _OfOneCard(self._estimates[key], launch)


class _OfOneCard(KnownEstimates):
    """The estimates of several cards, as one of them has them."""

    def __init__(self, shared: KnownEstimates, launch: Launch) -> None:
        targets: tuple[Target, ...] = shared.launch.target.targets  # type: ignore[attr-defined]  # those of ``Cards``
        self.task, self.launch, self.model, self.on_estimate = shared.task, launch, shared.model, shared.on_estimate
        self._shared, self._place, self._known = shared, targets.index(launch.target), {}

    def _estimate(self, size: int, loss: str | None, strategy: str) -> Measurement | None:
        self._shared.of_size(size, loss, (ladder.PLAIN, strategy))
        found = self._shared._known[size, loss][strategy]
        return found and replace(found, traces=[(plan, self._on_card(trace)) for plan, trace in found.traces])

    def _on_card(self, trace: Any) -> Any:
        def on_card(value: Any) -> float:
            return value[self._place] if isinstance(value, OfEach) else value

        return replace(trace, seconds=[list(map(on_card, run)) for run in trace.seconds])


_READ = fit._Page.read


@dataclass
class HostMemory:
    """The most memory of a host that any candidate takes: a host with that much changes no answer."""

    most_bytes: int = 0

    def candidates(self, *args: Any) -> list[Candidate]:
        """``SearchSpace.candidates``, looked at."""
        found = _CANDIDATES(*args)
        needs = (one.host_bytes * one.layout.num_processes for one in found)
        self.most_bytes = max([self.most_bytes, *needs])
        return found


_CANDIDATES = SearchSpace.candidates


@contextmanager
def sharing_estimates() -> Iterator[HostMemory]:
    """Inside, ``memsave fit`` of one model shares its estimates between cards, and makes all in this process."""

    @contextmanager
    def here(items: Iterator[Any]) -> Iterator[Iterator[Any]]:
        yield items

    shared, host = SharedEstimates(), HostMemory()
    with ExitStack() as undo:
        undo.enter_context(replaced(ladder, "ahead", here))
        undo.enter_context(replaced(ladder, "KnownEstimates", shared.of))
        undo.enter_context(replaced(fit._Page, "read", lambda page, flags: shared.read(page, flags)))
        undo.enter_context(replaced(SearchSpace, "candidates", lambda *args: host.candidates(*args)))
        undo.enter_context(replaced(estimate, "max", later))
        yield host


Answer = tuple[dict[str, Any], str]
"""What ``memsave fit`` writes and says."""


def answer(word: str, card: str, *flags: str) -> Answer:
    """Run ``memsave fit``."""
    words = ["fit", word, "--card", card, *flags, "--json", STDOUT]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as said:
        cli.main(words)
    if not out.getvalue():
        raise RuntimeError(f"{' '.join(words)}: {said.getvalue()}")
    return json.loads(out.getvalue()), said.getvalue().strip()


class Table(list[str]):
    """Texts that rows name by their places."""

    def place(self, text: str) -> int:
        """The place of ``text``, which is added where it is new."""
        if text not in self:
            self.append(text)
        return self.index(text)


def mib(num_bytes: int) -> int:
    """In MiB, rounded up."""
    return ceil(num_bytes / MIB)


def row_of(rung: dict[str, Any], texts: Table, word: str, model: known_models.KnownModel, budget: str) -> list[Any]:
    """A rung as the page reads it; names and lines are places in ``texts``, a line -1 where the rung does not fit."""
    line = -1
    if rung["fits"]:
        launch = rung["launch"].replace(word, model.word).replace(f"{recipes_folder().parent}/", "")
        micro = f"--micro_batch_size {rung['micro_batch_size']} "
        launch = launch.replace(micro, f"--micro_batch_size {MICRO} ").replace(model.word, MODEL_WORD)
        line = texts.place(launch.replace(f"--memory_budget_gib {budget} ", f"--memory_budget_gib {BUDGET} "))
    return [
        texts.place(rung["name"]),
        texts.place(rung["changes"]),
        rung["num_processes"],
        rung["micro_batch_size"],
        rung["accumulation_steps"],
        texts.place(rung["strategy"]),
        mib(rung["needed_bytes"]),
        mib(rung["host_bytes"]),
        float(f"{rung['step_s']:.4g}"),
        line,
        *(mib(num_bytes) for num_bytes in parts_of(rung["parts"])),
    ]


PARTS = {
    "weights": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer state",),
    "activations": ("activations", "temporaries"),
    "communication": ("communication",),
}
"""Kinds of memory on the page, of those that ``memsave fit`` tells apart; all others are kept free or the driver's."""


def parts_of(parts: dict[str, int]) -> list[int]:
    """Bytes of each of ``PARTS``."""
    return [sum(parts[name] for name in names) for names in PARTS.values()]


def compact(found: dict[str, Any], said: str, texts: Table, word: str, model: known_models.KnownModel) -> list[Any]:
    """An answer as the page reads it: the place of the best rung, what is said where none fits, and the rungs."""
    budget = f"{found['budget_bytes'] / GIB:.12g}"
    best = -1 if found["best"] is None else found["best"]
    said = said.partition(f": {fit.LEAST}")[2].replace(word, model.word)
    return [best, said.strip(), [row_of(rung, texts, word, model, budget) for rung in found["rungs"]]]


def length_of(found: dict[str, Any]) -> str:
    """The length of a model's rows, or the size of its images, among the recipe's flags."""
    flags = found["flags"]
    return next(
        flags[flags.index(name) + 1] for name in ("--block_size", "--max_length", "--image_size") if name in flags
    )


def read_figures() -> dict[str, Any]:
    """What the page has."""
    text = FIGURES.search(PAGE.read_text(encoding="utf-8"))
    assert text is not None, f"{PAGE} has no figures"
    return json.loads(text[0])


def write_figures(figures: dict[str, Any]) -> None:
    """Put ``figures`` into the page, a line for each model."""

    def tight(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    models = ",\n".join(f"{tight(name)}:{tight(value)}" for name, value in figures["models"].items())
    others = ",\n".join(f"{tight(name)}:{tight(value)}" for name, value in figures.items() if name != "models")
    text = f'{{{others},\n"models":{{\n{models}\n}}}}\n'.replace("</", "<\\/")
    page = FIGURES.sub(lambda _: text, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


def of_host_memory(gib: int | None) -> list[str]:
    """The flags of ``memsave fit`` for a host."""
    return [] if gib is None else ["--host_memory", f"{gib}GiB"]


def of_model(model: known_models.KnownModel, length: int | None) -> list[str]:
    """The flags of ``memsave fit`` for a model and a length of its rows."""
    return [*model.flags, *([] if length is None else ["--length", str(length)])]


def answers(word: str, flags: Sequence[str]) -> list[list[Answer | None]]:
    """By card, the answers for each of ``HOSTS_GIB``; ``None`` where it is that for a host with enough, the first."""
    by_card: list[list[Answer | None]] = []
    with sharing_estimates() as host:

        def of_host(card: str, gib: int | None) -> tuple[Answer, int]:
            host.most_bytes = 0
            return answer(word, card, *of_host_memory(gib), *flags), host.most_bytes

        for card in CARDS:
            with_enough, most_bytes = of_host(card, None)
            of_hosts: list[Answer | None] = [with_enough]
            for gib in HOSTS_GIB[1:]:
                is_less = most_bytes > gib * GIB
                of_hosts.append(of_host(card, gib)[0] if is_less else None)
            by_card.append(of_hosts)
            print(".", end="", file=sys.stderr, flush=True)
    return by_card


def add_to_page(model: known_models.KnownModel, word: str, by_card: list[list[Answer | None]]) -> None:
    """Put the answers for a model into the page, beside all that it has."""
    figures = read_figures()
    texts, models = Table(figures.get("texts", [])), figures.get("models", {})
    (found, _), *_ = filter(None, by_card[0])
    new = [[one and compact(*one, texts, word, model) for one in of_hosts] for of_hosts in by_card]
    sizes = models.get(model.name, {"sizes": {}})["sizes"] | {length_of(found): new}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    about = {"word": model.word, "recipe": found["recipe"], "flags": " ".join(model.flags)}
    models[model.name] = {**about, "versions": versions, "sizes": sizes}
    of_all = {
        "versions": figures.get("versions", versions),
        "cards": [describe(card) for card in CARDS],
        "hosts_gib": HOSTS_GIB,
        "parts": list(PARTS),
        "texts": texts,
    }
    names = [one.name for one in known_models.MODELS]
    write_figures({**of_all, "models": dict(sorted(models.items(), key=lambda item: names.index(item[0])))})


def describe(word: str) -> dict[str, Any]:
    """A card as the page shows it."""
    target = find_target(word)
    budget_bytes = int(fit.to_gib(fit.usable_bytes(target.memory_bytes, target.device)) * GIB)
    return {
        "word": word,
        "name": target.name,
        "memory_mib": target.memory_bytes // MIB,
        "budget_mib": budget_bytes // MIB,
        "budget": f"{budget_bytes / GIB:.12g}",
        "precision": fit._fast_precision(target),
    }


def main(args: Sequence[str] | None = None) -> None:
    """Add what the flags name to the page."""
    parser = harness.make_parser(__doc__)
    of_name = {model.name: model for model in known_models.MODELS}
    parser.add_argument("--model", choices=of_name, nargs="+", default=[*of_name])
    parser.add_argument("--length", type=int, help="tokens of a row, for language models")
    parser.add_argument("--again", action="store_true", help="answers that the page has, too")
    flags = parser.parse_args(args)
    for model in map(of_name.__getitem__, flags.model):
        known = read_figures().get("models", {}).get(model.name, {"recipe": LANGUAGE, "sizes": {}})
        has = str(flags.length) in known["sizes"] if flags.length else bool(known["sizes"])
        if (has and not flags.again) or (flags.length and known["recipe"] != LANGUAGE):
            continue
        began, word = perf_counter(), model.write(harness.ROOT / "out" / "fit_page")
        add_to_page(model, word, answers(word, of_model(model, flags.length)))
        print(f" {model.name}: {perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
