"""Ways to train a model on a device, from the plain one to those that change more, each with its memory and time.

NOTE [ the ladder ]
1. A *rung* is a set of flags of the model's recipe; docs/planner.md lists them. Every figure is that of
   ``memsave plan``: the same task, estimates and solver.
2. The search tries plans at the largest micro-batch that fits without checkpointing and at the next one: smaller ones
   are slower, and larger ones gain little. Where the plain one fits, no plan of the same micro-batch is faster, so only
   the next one is planned. Plans with MLPs in tiles are tried where no other fits.
3. The optimizer in the backward and adapters share few estimates with the other rungs. A process of its own looks for
   each of them meanwhile, which takes about a third off the time with two cores.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from memsave_recipes.core.activations.streaming import resident_tensors
from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.search import AS_FAST, Candidate, Choice, SearchSpace
from memsave_recipes.core.planner.task import Estimates, Launch, Task, layouts_of, shard_groups, space_of
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES, TILED_STRATEGIES, offloads
from memsave_recipes.core.processes import ahead
from memsave_recipes.core.sharding import ShardGroups
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.models.hub import ask_hub_for, reason
from memsave_recipes.models.image_classifiers import MODELS, read_convnet
from memsave_recipes.models.pretrained import LOADING_ERRORS, check_configuration
from memsave_recipes.models.saved import KINDS
from memsave_recipes.training.arguments import BUDGET_FLAG

IMAGES, TEXTS, LANGUAGE = "image_classification", "text_classification", "language_modeling"
RECIPES = {"image-classification": IMAGES, "text-classification": TEXTS, "text-generation": LANGUAGE}
CONFIG = "config.json"
LENGTHS = {TEXTS: 512, LANGUAGE: 2048}
LENGTH_FLAGS = {TEXTS: "max_length", LANGUAGE: "block_size"}
PIXELS = 224
HINT = "name a folder with a config.json, a type of transformers such as llama, one of ours such as vgg16, or a Hub id"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to train: the name of its recipe, and the flags of the recipe that name it.

    Args:
        is_pretrained: whether it has weights to start from.
        length, image_size: of its samples by default; ``None`` where it has no such size.
        remarks: sentences about it.
    """

    recipe: str
    flags: tuple[str, ...]
    is_pretrained: bool = False
    length: int | None = None
    image_size: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def length_flag(self) -> str:
        """The recipe's flag for ``length``."""
        return LENGTH_FLAGS.get(self.recipe, "")


def find_subject(word: str) -> Subject:
    """Return the model that ``word`` names: a folder or its config.json, one of ours, a type of transformers, a Hub id.

    Raises:
        InputError: no such model, or no recipe trains it.
    """
    path = Path(word)
    if os.path.isfile(path):
        if path.name != CONFIG:
            raise InputError(f"MODEL {word} is a file: {HINT}")
        word = str(path.parent)
    if os.path.isdir(word):
        return _in_folder(word)
    if word in MODELS:
        return Subject(recipe=IMAGES, flags=("--model", word), image_size=PIXELS)
    if word in CONFIG_MAPPING:
        config = AutoConfig.for_model(word)
        remark = f"{word}: a model from scratch, of the sizes that transformers gives the type"
        subject = _configured(word, config, flags=("--model_type", word), remarks=(remark,))
        vocabulary = getattr(config, "vocab_size", None)
        if subject.recipe == IMAGES or vocabulary is None:
            return subject
        return replace(subject, flags=(*subject.flags, "--config_overrides", f"vocab_size={vocabulary}"))
    return _pretrained(word)


def _in_folder(folder: str) -> Subject:
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        raise InputError(f"MODEL {folder} has no {CONFIG}: {HINT}")
    saved = read_convnet(folder)
    if saved is not None:
        flags = ("--model_name_or_path", folder)
        return Subject(recipe=IMAGES, flags=flags, is_pretrained=True, image_size=saved.image_size)
    has_weights = any(Path(folder).glob("*.safetensors"))
    remark = f"{folder} has no weights (*.safetensors): put them there before launching"
    return _pretrained(folder, () if has_weights else (remark,))


def _pretrained(word: str, remarks: tuple[str, ...] = ()) -> Subject:
    ask_hub_for(word)
    try:
        config = AutoConfig.from_pretrained(word, trust_remote_code=False)
        check_configuration(config)
    except LOADING_ERRORS as error:
        brings_code = "trust_remote_code" in str(error)
        why = "it brings code of its own, which is not run" if brings_code else reason(error)
        raise InputError(f"MODEL {word} cannot be read: {why}; {HINT}") from error
    return _configured(word, config, flags=("--model_name_or_path", word), is_pretrained=True, remarks=remarks)


def _configured(word: str, config: Any, **known: Any) -> Subject:
    """Add what a configuration says of a model: its recipe and the sizes of its samples."""
    recipe = _recipe_of(word, config)
    if recipe == IMAGES:
        size = getattr(config, "image_size", None)
        return Subject(recipe=recipe, image_size=size if isinstance(size, int) and size > 0 else PIXELS, **known)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    has_fewer = isinstance(positions, int) and 0 < positions < LENGTHS[recipe]
    return Subject(recipe=recipe, length=positions if has_fewer else LENGTHS[recipe], **known)


def _recipe_of(word: str, config: Any) -> str:
    """Name the recipe by the classes in ``architectures``, else by the type.

    A type that has a masked language model is an encoder, which is trained as a text classifier.
    """
    named, kind = set(config.architectures or ()), config.model_type
    for task, (_, classes) in KINDS.items():
        if named & set(chain.from_iterable([one] if isinstance(one, str) else one for one in classes.values())):
            return RECIPES[task]
    types = [task for task, (_, classes) in KINDS.items() if kind in classes]
    if "text-generation" in types and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return LANGUAGE
    if not types:
        raise InputError(
            f"MODEL {word} is of type {kind}, which no recipe trains: take a causal language model, or a model that "
            "classifies texts or images"
        )
    return RECIPES[types[0]]


CARDS = (2, 4, 8)
PLAIN, BUDGET = "none", "budget"
ESTIMATED = (PLAIN, "selective")
WITH_OFFLOADING = (*ESTIMATED, *OFFLOADING_STRATEGIES)
IN_BACKWARD = ("--optimizer_in_backward", "--max_grad_norm", "0")
STATE_ON_HOST = ("--offload_optimizer", "state")
STEP_ON_HOST = ("--offload_optimizer", "step")
WEIGHTS_ON_HOST = (*STEP_ON_HOST, "--stream_weights", "host")
ROUNDED = ("--dtype", "bfloat16", "--optimizer", "adamw_bf16")
EIGHT_BIT = ("--optimizer", "adamw_8bit")
STREAMED = ("--stream_weights", "host")
IN_SHARDS = ("--shard", "full")
SAME_CURVE = ""
STEPS_ON_HOST = (
    ("step on host", STEP_ON_HOST, SAME_CURVE),
    ("step, weights on host", WEIGHTS_ON_HOST, SAME_CURVE),
    ("step on host, bfloat16", (*STEP_ON_HOST, *ROUNDED), "rounded weights"),
    ("step, weights on host, bf16", (*WEIGHTS_ON_HOST, *ROUNDED), "rounded weights"),
)
"""Names, flags and changes of ways to train all weights on a small card, each for where those before do not fit."""


@dataclass
class KnownEstimates(Estimates):
    """The costs of a task's micro-batches on a device, each estimated once.

    Args:
        on_estimate: called before each estimate with a few words about it.
    """

    on_estimate: Callable[[str], object] = lambda words: None
    _known: dict[tuple[int, str | None], dict[str, Measurement | None]] = field(default_factory=dict)

    def of_size(self, size: int, loss: str | None, strategies: Sequence[str]) -> Measurement:
        """Return the costs of a micro-batch of ``size`` samples under the ``strategies`` that the model can run under.

        Raises:
            InputError: it cannot run under ``none``, which is the first of them.
        """
        known = self._known.setdefault((size, loss), {})
        missing = [strategy for strategy in strategies if strategy not in known]
        if missing:
            self.on_estimate(f"micro-batch {size}")
        for strategy in missing:
            known[strategy] = self._estimate(size, loss, strategy)
        found = [measured for strategy in strategies if (measured := known[strategy])]
        return replace(found[0], traces=[trace for measured in found for trace in measured.traces])

    def _estimate(self, size: int, loss: str | None, strategy: str) -> Measurement | None:
        try:
            return self.of(BatchLayout.of(size, None, 1), loss, lambda one: [plan_for(strategy, one.stacks)])
        except LOADING_ERRORS as error:
            if strategy != PLAIN:
                return None
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"MODEL: a step of {type(self.model).__name__} cannot be estimated ({reason(error)}): look at its "
                f"{CONFIG}, or launch its recipe with {BUDGET_FLAG}, which measures"
            ) from error

    def largest(self, loss: str | None) -> int:
        """Return the largest micro-batch that has been estimated with this loss."""
        return max(size for size, its_loss in self._known if its_loss == loss)


def with_tiles(strategies: tuple[str, ...]) -> tuple[str, ...]:
    """Add MLPs in tiles; their layers' inputs go to the host where ``strategies`` offload."""
    has_host = any(map(offloads, strategies))
    return *strategies, *(name for name in TILED_STRATEGIES if has_host or not offloads(name))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task on devices, and the candidates for it.

    Args:
        estimates: of a task with the same model.
        strategies: whose costs the solver's plans are made of.
        like: a setting whose estimates tell where to begin to look for the largest micro-batch.
    """

    task: Task
    launch: Launch
    estimates: KnownEstimates
    budget_bytes: int
    strategies: tuple[str, ...] = ESTIMATED
    like: "Setting | None" = None
    _plain: dict[tuple[int, str | None], list[Candidate]] = field(default_factory=dict, init=False)

    @cached_property
    def layouts(self) -> list[BatchLayout]:
        """The layouts to search."""
        return layouts_of(self.task, self.launch.num_processes)

    def plain(self, loss: str | None) -> Candidate:
        """Search without checkpointing for the largest micro-batch that fits, or the smallest."""
        return self._plain_candidates(self._largest(loss), loss)[0]

    def best(self, loss: str | None, layout: BatchLayout | None = None) -> Candidate:
        """Search all plans, of one layout if it is given: rule 2 of NOTE [ the ladder ]."""
        choice = self._choice(loss, layout)
        takes_tiles = self.groups is None and self.has_room
        if choice.chosen is None and takes_tiles and _peaks_in_blocks(choice.smallest):
            choice = replace(self, strategies=with_tiles(self.strategies))._choice(loss, layout)
        return choice.chosen or choice.smallest

    def _choice(self, loss: str | None, layout: BatchLayout | None) -> Choice:
        if layout is not None:
            return Choice(candidates=tuple(self.planned(layout, loss)))
        at = self._largest(loss)
        found = self._plain_candidates(at, loss)
        for layout in self.layouts[at + found[0].fits : at + 2]:
            found += self.planned(layout, loss)
            if not any(candidate.fits for candidate in found):
                break
        return Choice(candidates=tuple(found))

    def planned(self, layout: BatchLayout, loss: str | None) -> list[Candidate]:
        """Return the candidates of ``memsave plan`` for a layout; a few where nothing can fit."""
        return self._candidates(layout, loss, BUDGET, self.strategies if self.has_room else (PLAIN,))

    def takes(self, loss: str | None) -> bool:
        """Return whether the model's head allows this loss."""
        try:
            self.plain(loss)
        except InputError:
            return False
        return True

    def _candidates(
        self, layout: BatchLayout, loss: str | None, strategy: str, measured: Sequence[str]
    ) -> list[Candidate]:
        costs = self.estimates.of_size(layout.micro_batch_size, loss, measured)
        return replace(self._space, strategy=strategy).candidates(costs, layout, loss)

    @cached_property
    def _space(self) -> SearchSpace:
        return space_of(self.task, self.launch, self.estimates.model, self.budget_bytes)

    @property
    def groups(self) -> ShardGroups | None:
        """The groups of ranks that hold the model in shards."""
        return shard_groups(self.task, self.launch)

    def _plain_candidates(self, at: int, loss: str | None) -> list[Candidate]:
        """Return the plain candidate; in shards one for each way to reduce gradients, after every micro-batch first."""
        if (at, loss) not in self._plain:
            self._plain[at, loss] = self._candidates(self.layouts[at], loss, PLAIN, (PLAIN,))
        return self._plain[at, loss].copy()

    def _largest(self, loss: str | None) -> int:
        """Return the number of the largest layout that fits without checkpointing; 0 where none does."""

        def fits(at: int) -> bool:
            return self._plain_candidates(at, loss)[0].fits

        last = len(self.layouts) - 1
        at = min(last, self._guess(loss) + 1)  # that one is asked about anyway, and often fits: guesses are low
        while at and not fits(at):
            at -= 1
        while at < last and fits(at) and fits(at + 1):
            at += 1
        return at

    @property
    def has_room(self) -> bool:
        """Whether the memory has room for more than ``least_bytes``."""
        return self.least_bytes < self.budget_bytes

    @cached_property
    def least_bytes(self) -> int:
        """Weights, optimizer state and, where they exist at the same time, gradients."""
        model, static = self.estimates.model, self._space.static(self.layouts[0])
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        leave = static.leaving_bytes is not None
        gradients = 0 if leave else trained // (self.groups.size if self.groups else 1)
        weights = sum(tensor.nbytes for tensor in resident_tensors(model)) - static.remote_bytes
        return weights + static.state_bytes + gradients

    def _guess(self, loss: str | None) -> int:
        """Guess the largest layout that fits, as if activations and temporaries grew with the micro-batch; -1 for none.

        They are those of the largest micro-batch that ``like`` has estimates of; else of the largest of all where half
        of the memory is left for them, or of the smallest.
        """
        like = self.like or self
        sizes = [layout.micro_batch_size for layout in like.layouts]
        first = len(sizes) - 1 if 2 * self.least_bytes < self.budget_bytes else 0
        known = like._plain_candidates(first if like is self else sizes.index(like.estimates.largest(loss)), loss)[0]
        growing = max(1, known.parts["activations"] + known.parts["temporaries"])
        free = known.budget_bytes - known.needed_bytes + like.least_bytes - self.least_bytes
        most = known.layout.micro_batch_size * (1 + free / growing)
        return max([at for at, layout in enumerate(self.layouts) if layout.micro_batch_size <= most], default=-1)


def _peaks_in_blocks(candidate: Candidate) -> bool:
    """Return whether a plan can lower the need: not where the memory outside of all blocks is too much by itself."""
    peak, chain = candidate.forecast.peak, candidate.forecast.chain
    return peak.block in chain.decided_names or candidate.needed_bytes - peak.held_bytes <= candidate.budget_bytes


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A way to train, and the fastest candidate that fits, or the one that needs least.

    Args:
        flags: of the recipe, besides those of the model.
        changes: in the training; ``SAME_CURVE`` where the loss curve is that of the first rung.
    """

    name: str
    flags: tuple[str, ...] = ()
    num_processes: int = 1
    candidate: Candidate
    changes: str = SAME_CURVE


def ladder(
    read: Callable[[Sequence[str]], Task],
    launch: Launch,
    budget_bytes: int,
    *,
    takes_adapters: bool,
    on_estimate: Callable[[str], object] = lambda words: None,
) -> Iterator[Rung]:
    """Yield the rungs, each as soon as it is known: NOTE [ the ladder ].

    Args:
        read: the task of the model's recipe under further flags, with plan and micro-batch left open.
        takes_adapters: whether the model has weights that adapters are for.
        on_estimate: called before each estimate of this process.

    Raises:
        InputError: flags that the recipe refuses.
    """
    task = read(())
    estimates = KnownEstimates(task, launch, on_estimate)
    whole = Setting(task=task, launch=launch, estimates=estimates, budget_bytes=budget_bytes)
    known: list[tuple[Rung, Iterator[Rung]]] = []
    with ExitStack() as processes:
        for way in _ways(whole, read, takes_adapters, lambda way: processes.enter_context(ahead(way))):
            if (rung := next(way, None)) is not None:
                known.append((rung, way))
                yield rung
        if (best := best_rung([rung for rung, _ in known])) is not None:
            yield from next(wider for rung, wider in known if rung is best)
    if best is None or best.changes != SAME_CURVE:
        yield from _in_shards(whole, read)


def _ways(
    whole: Setting,
    read: Callable[[Sequence[str]], Task],
    takes_adapters: bool,
    early: Callable[[Iterator[Rung]], Iterator[Rung]],
) -> Iterator[Iterator[Rung]]:
    """Yield the rungs of each way to train; ``early`` begins to make some that are not asked for yet."""
    loss, *others = whole.task.losses
    yield _way("no checkpointing", whole, partial(whole.plain, loss))
    for other in filter(whole.takes, others):
        loss = other
        yield _way("loss in chunks", whole, partial(whole.plain, loss))
    in_backward = early(_in_backward(whole, read, loss))
    adapters = ("--lora", "--dtype", whole.launch.half)
    adapted = early(_adapted(whole, read, loss, "LoRA", adapters) if takes_adapters else iter(()))
    planned = whole.best(loss)
    yield _way("activation checkpointing", whole, lambda: planned)
    yield _offloading(whole, loss, planned)
    on_host = _state_on_host(whole, read, loss, planned)
    of_state = [*islice(on_host, 1)]
    yield chain(of_state, on_host)
    if of_state and not any(rung.candidate.fits for rung in of_state) and whole.launch.mixed_precision != "fp16":
        yield from _step_on_host(whole, read, loss)
    in_8_bit = _in_8_bit(whole, read, loss)
    known = [*islice(in_8_bit, 1)]  # while the other process makes those in the backward
    stepped = [*islice(in_backward, 1)]
    yield chain(stepped, in_backward)
    if not any(rung.candidate.fits for rung in stepped) and whole.launch.target.device_type != "cpu":
        yield _in_backward(whole, read, loss, "on host, in the backward", (*STATE_ON_HOST, *IN_BACKWARD))
    yield chain(known, in_8_bit)
    first = next(adapted, None)
    if first is not None:
        yield chain([first], adapted)
        if not first.candidate.fits and whole.launch.target.device_type != "cpu":
            yield _adapted(whole, read, loss, "LoRA, weights streamed", (*adapters, *STREAMED))


def _way(
    name: str,
    setting: Setting,
    find: Callable[[], Candidate],
    flags: tuple[str, ...] = (),
    changes: str = SAME_CURVE,
) -> Iterator[Rung]:
    """Yield the rung on one device, then those with the same micro-batches on several, if there are as many."""
    rung = Rung(name=name, flags=flags, candidate=find(), changes=changes)
    yield rung
    layout = rung.candidate.layout
    for count in CARDS:
        if count <= layout.accumulation_steps and setting.task.run.micro_batch_size == AUTO:
            shared = BatchLayout.of(layout.global_batch_size, layout.micro_batch_size, count)
            wider = replace(setting, launch=setting.launch.over(count))
            found = wider.best(rung.candidate.loss, shared)
            yield replace(rung, name=f"{count} cards", num_processes=count, candidate=found)


def _in_shards(whole: Setting, read: Callable[[Sequence[str]], Task]) -> Iterator[Rung]:
    """Yield a rung for each number of devices, up to as many as suffice."""
    launch = whole.launch
    if launch.target.device_type == "cpu" or launch.mixed_precision == "fp16" or not whole.task.optim.goes_in_shards:
        return
    task = read(IN_SHARDS)
    estimates = KnownEstimates(task, whole.launch, whole.estimates.on_estimate)
    loss = [loss for loss in whole.task.losses if whole.takes(loss)][-1]
    for count in CARDS:
        if count <= whole.task.run.global_batch_size:
            wider = replace(whole, task=task, launch=launch.over(count), estimates=estimates)
            found = wider.best(loss)
            yield Rung(name=f"{count} cards, in shards", flags=IN_SHARDS, num_processes=count, candidate=found)
            if found.fits:
                return


def _offloading(whole: Setting, loss: str | None, planned: Candidate) -> Iterator[Rung]:
    """Yield the rungs with offloading if it fits where ``planned`` does not, or is faster."""
    if whole.launch.target.device_type == "cpu" or not whole.has_room:
        return
    offloading = replace(whole, strategies=WITH_OFFLOADING)
    best = offloading.best(loss)
    if best.fits and (not planned.fits or best.step_s < (1 - AS_FAST) * planned.step_s):
        yield from _way("offloading", offloading, lambda: best)


def _state_on_host(
    whole: Setting, read: Callable[[Sequence[str]], Task], loss: str | None, planned: Candidate
) -> Iterator[Rung]:
    """Yield the rungs with optimizer state on the host, if ``planned`` does not fit or is slower."""
    if whole.launch.target.device_type == "cpu" or planned.strategy == PLAIN:
        return
    waiting = replace(whole, task=read(STATE_ON_HOST), like=whole)
    best = waiting.best(loss)
    if not best.fits and waiting.has_room:
        waiting = replace(waiting, strategies=WITH_OFFLOADING)
        best = waiting.best(loss)
    if not planned.fits or (best.fits and best.step_s < (1 - AS_FAST) * planned.step_s):
        yield from _way("optimizer state on host", waiting, lambda: best, STATE_ON_HOST)


def _step_on_host(whole: Setting, read: Callable[[Sequence[str]], Task], loss: str | None) -> Iterator[Iterator[Rung]]:
    """Yield rungs of ``STEPS_ON_HOST`` on one device, up to the first that fits; not those that the recipe refuses."""
    for name, flags, changes in STEPS_ON_HOST:
        try:
            task = read(flags)
            estimates = whole.estimates
            if flags != STEP_ON_HOST:
                estimates = KnownEstimates(task, whole.launch, estimates.on_estimate)
            found = replace(whole, task=task, estimates=estimates, like=whole).best(loss)
        except InputError:
            continue
        yield iter([Rung(name=name, flags=flags, candidate=found, changes=changes)])
        if found.fits:
            return


def _in_backward(
    whole: Setting,
    read: Callable[[Sequence[str]], Task],
    loss: str | None,
    name: str = "optimizer in the backward",
    flags: tuple[str, ...] = IN_BACKWARD,
) -> Iterator[Rung]:
    is_undivided = whole.layouts[-1].accumulation_steps == whole.launch.num_processes == 1
    if whole.launch.mixed_precision == "fp16" or not is_undivided:
        return
    stepping = replace(whole, task=read(flags), like=whole)
    if stepping.has_room:
        yield from _way(name, stepping, partial(stepping.best, loss), flags, "nothing is clipped")


def _in_8_bit(whole: Setting, read: Callable[[Sequence[str]], Task], loss: str | None) -> Iterator[Rung]:
    if whole.task.optim.optimizer == "adamw":
        smaller = replace(whole, task=read(EIGHT_BIT), like=whole)
        yield from _way("8-bit AdamW", smaller, partial(smaller.best, loss), EIGHT_BIT, "optimizer state")


def _adapted(
    whole: Setting, read: Callable[[Sequence[str]], Task], loss: str | None, name: str, flags: tuple[str, ...]
) -> Iterator[Rung]:
    """Yield no rung where the model takes no adapters (MobileNet), or has no layers to stream (ResNet)."""
    if not whole.task.takes_adapters:
        return
    try:
        task = read(flags)
        estimates = KnownEstimates(task, whole.launch, whole.estimates.on_estimate)
    except InputError:
        return
    adapted = replace(whole, task=task, estimates=estimates, like=whole)
    yield from _way(name, adapted, partial(adapted.best, loss), flags, "adapters train")


def best_rung(rungs: Sequence[Rung]) -> Rung | None:
    """Return the fastest that fits of those that change nothing, else the first that fits; ``None`` where none does.

    One on several devices is only taken where nothing fits a single one.
    """
    fitting = [rung for rung in rungs if rung.candidate.fits]
    fitting = [rung for rung in fitting if rung.num_processes == 1] or fitting
    same = [rung for rung in fitting if rung.changes == SAME_CURVE]
    if not same:
        return fitting[0] if fitting else None
    chosen = Choice(candidates=tuple(rung.candidate for rung in same)).chosen
    return next(rung for rung in same if rung.candidate is chosen)
