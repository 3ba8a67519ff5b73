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

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf

from memsave_recipes.core.activations.streaming import resident_tensors
from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import COMPILED_RATIOS
from memsave_recipes.core.planner.search import AS_FAST, Candidate, Choice, SearchSpace
from memsave_recipes.core.planner.task import (
    Estimates,
    Launch,
    Task,
    are_enough,
    compiles,
    layouts_of,
    shard_groups,
    space_of,
)
from memsave_recipes.core.plans import Plan, plan_for
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES, TILED_STRATEGIES, Stacks, offloads
from memsave_recipes.core.processes import ahead
from memsave_recipes.core.sharding import ShardGroups
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.models.hub import reason
from memsave_recipes.models.pretrained import LOADING_ERRORS
from memsave_recipes.training.arguments import BUDGET_FLAG

CARDS = (2, 4, 8)
PLAIN, BUDGET = "none", "budget"
ESTIMATED = (PLAIN, "selective")
WITH_OFFLOADING = (*ESTIMATED, *OFFLOADING_STRATEGIES)
OF_COMPILED_LAYERS = (PLAIN, *OFFLOADING_STRATEGIES)
RATIOS = tuple(f"compiled:{ratio}" for ratio in COMPILED_RATIOS)
IN_BACKWARD = ("--optimizer_in_backward", "--max_grad_norm", "0")
STATE_ON_HOST = ("--offload_optimizer", "state")
STEP_ON_HOST = ("--offload_optimizer", "step")
STREAMED = ("--stream_weights", "host")
EIGHT_BIT = ("--optimizer", "adamw_8bit")
ROUNDED = ("--dtype", "bfloat16", "--optimizer", "adamw_bf16")
HALF = "HALF"
ADAPTED = ("--lora", "--dtype", HALF)
IN_SHARDS = ("--shard", "full")
SAME_CURVE = ""


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
            return self.of(BatchLayout.of(size, None, 1), loss, lambda one: [self._plan(strategy, one.stacks)])
        except LOADING_ERRORS as error:
            if strategy != PLAIN:
                return None
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"MODEL: a step of {type(self.model).__name__} cannot be estimated ({reason(error)}): look at its "
                f"config.json, or launch its recipe with {BUDGET_FLAG}, which measures"
            ) from error

    def _plan(self, strategy: str, stacks: Stacks) -> Plan:
        plan = plan_for(strategy, stacks)
        return plan.on_compiled_layers() if self.compiled else plan

    @cached_property
    def compiled(self) -> bool:
        """Whether layers compute compiled."""
        return compiles(self.task, self.launch.target, self.model)


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
    """

    task: Task
    launch: Launch
    estimates: KnownEstimates
    budget_bytes: int
    strategies: tuple[str, ...] = ESTIMATED
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
        takes_tiles = self.groups is None and self.has_room and not self.estimates.compiled
        if choice.chosen is None and takes_tiles and _peaks_in_blocks(choice.smallest):
            choice = replace(self, strategies=with_tiles(self.strategies))._choice(loss, layout)
        return choice.chosen or choice.smallest

    def _choice(self, loss: str | None, layout: BatchLayout | None) -> Choice:
        if layout is not None:
            return Choice(candidates=tuple(self.planned(layout, loss)))
        at = self._largest(loss)
        found = self._plain_candidates(at, loss)
        for layout in self.layouts[at + found[0].fits : at + 2]:
            found += self.planned(layout, loss, min([one.step_s for one in found if one.fits], default=inf))
            if not any(candidate.fits for candidate in found):
                break
        return Choice(candidates=tuple(found))

    def planned(self, layout: BatchLayout, loss: str | None, fastest_s: float = inf) -> list[Candidate]:
        """Return the candidates of ``memsave plan`` for a layout; a few where nothing can fit.

        Args:
            fastest_s: of a step with smaller micro-batches that fit.
        """
        candidates = partial(self._candidates, layout, loss, BUDGET)
        if not self.has_room:
            return candidates((PLAIN,))
        if not self.estimates.compiled:
            return candidates(self.strategies)
        strategies = tuple(filter(OF_COMPILED_LAYERS.__contains__, self.strategies))
        found = candidates(strategies)
        return found if are_enough(found, fastest_s) else candidates((*strategies, *RATIOS))

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

        def is_too_large(at: int) -> bool:
            return not self._plain_candidates(at, loss)[0].fits

        return max(0, bisect_left(range(len(self.layouts)), True, key=is_too_large) - 1)

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


CPU, FP16, DIVIDED, NO_ADAPTERS, ANOTHER_RULE, NO_PLAN = (
    *("a CPU", "fp16", "several micro-batches", "no adapters", "another optimizer than AdamW", "no plan"),
)
"""What a ``Way`` may not go with."""


@dataclass(frozen=True)
class Way:
    """A row of ``WAYS``: a rung that is looked for under flags of its own.

    Args:
        name, flags, changes: of the rung; ``HALF`` among the flags stands for the device's dtype of 16 bits.
        not_with: what it does not go with.
        after, unless: a rung that has to be there, and those of which none may fit.
        strategies: whose costs plans are made of, in turn until one fits.
        needs_room: whether it is left out where not even weights and optimizer fit.
        must_fit, must_be_faster: whether it is left out otherwise; faster than ``PLANNED``, if that fits.
        is_early: whether another process looks for it meanwhile: rule 3 of NOTE [ the ladder ].
        has_own_costs: whether a micro-batch costs something else than with the first rung's flags.
        is_alone: whether several devices are not tried.
    """

    name: str
    flags: tuple[str, ...] = ()
    changes: str = SAME_CURVE
    not_with: Set[str] = frozenset()
    after: str | None = None
    unless: tuple[str, ...] = ()
    strategies: tuple[tuple[str, ...], ...] = (ESTIMATED,)
    needs_room: bool = False
    must_fit: bool = False
    must_be_faster: bool = False
    is_early: bool = False
    has_own_costs: bool = False
    is_alone: bool = False


PLANNED, STATE, STEPPED, LORA = (
    *("activation checkpointing", "optimizer state on host", "optimizer in the backward", "LoRA"),
)
STEPS = {
    "step on host": (),
    "step, weights on host": STREAMED,
    "step on host, bfloat16": ROUNDED,
    "step, weights on host, bf16": (*STREAMED, *ROUNDED),
}
"""Ways to train all weights on a small card, each for where those before do not fit."""
WAYS = (
    Way(PLANNED),
    Way("offloading", not_with={CPU}, strategies=(WITH_OFFLOADING,), must_fit=True, must_be_faster=True),
    Way(STATE, STATE_ON_HOST, not_with={CPU, NO_PLAN}, strategies=(ESTIMATED, WITH_OFFLOADING), must_be_faster=True),
    *(
        Way(
            name,
            (*STEP_ON_HOST, *flags),
            "rounded weights" if "--dtype" in flags else SAME_CURVE,
            not_with={FP16},
            after=STATE,
            unless=(STATE, *STEPS),
            has_own_costs=bool(flags),
            is_alone=True,
        )
        for name, flags in STEPS.items()
    ),
    Way(STEPPED, IN_BACKWARD, "nothing is clipped", not_with={FP16, DIVIDED}, needs_room=True, is_early=True),
    Way(
        "on host, in the backward",
        (*STATE_ON_HOST, *IN_BACKWARD),
        "nothing is clipped",
        not_with={CPU, FP16, DIVIDED},
        unless=(STEPPED,),
        needs_room=True,
    ),
    Way("8-bit AdamW", EIGHT_BIT, "optimizer state", not_with={ANOTHER_RULE}),
    Way(LORA, ADAPTED, "adapters train", not_with={NO_ADAPTERS}, is_early=True, has_own_costs=True),
    Way(
        "LoRA, weights streamed",
        (*ADAPTED, *STREAMED),
        "adapters train",
        not_with={CPU},
        after=LORA,
        unless=(LORA,),
        has_own_costs=True,
    ),
)
"""The rungs after those without a plan, in this order."""


@dataclass
class Ladder:
    """What is known of the rungs.

    Args:
        whole: without further flags.
        read: the task of the model's recipe under further flags.
        takes_adapters: whether the model has weights that adapters are for.
        loss: of the rungs to come.
        found: the candidates by the names of the rungs.
    """

    whole: Setting
    read: Callable[[Sequence[str]], Task]
    takes_adapters: bool
    loss: str | None
    found: dict[str, Candidate] = field(default_factory=dict)

    def ways(self, processes: ExitStack) -> Iterator[Iterator[Rung]]:
        """Yield the rungs of each way to train; other processes look for some meanwhile."""
        yield self._without_plan("no checkpointing")
        for loss in filter(self.whole.takes, self.whole.task.losses[1:]):
            self.loss = loss
            yield self._without_plan("loss in chunks")
        early = {way.name: processes.enter_context(ahead(self._rungs(way))) for way in WAYS if way.is_early}
        for way in WAYS:
            yield early.get(way.name) or self._rungs(way)

    def _without_plan(self, name: str) -> Iterator[Rung]:
        rung = Rung(name=name, candidate=self.whole.plain(self.loss))
        yield rung
        yield from _on_several(rung, self.whole)

    def _rungs(self, way: Way) -> Iterator[Rung]:
        """Yield the rung of a way, then those on several devices; none where the recipe refuses the flags."""
        has_known = way.after is None or way.after in self.found
        if not has_known or way.not_with & self._obstacles or any(map(self._fits, way.unless)):
            return
        flags = tuple(self.whole.launch.half if word == HALF else word for word in way.flags)
        try:
            setting, candidate = self._best(way, flags)
        except InputError:
            return
        is_let = (setting.has_room or not way.needs_room) and (candidate.fits or not way.must_fit)
        if is_let and (self._is_faster(candidate) or not way.must_be_faster):
            rung = Rung(name=way.name, flags=flags, candidate=candidate, changes=way.changes)
            yield rung
            yield from () if way.is_alone else _on_several(rung, setting)

    def _best(self, way: Way, flags: tuple[str, ...]) -> tuple[Setting, Candidate]:
        setting = self.whole
        if flags:
            task, estimates = self.read(flags), setting.estimates
            if way.has_own_costs:
                estimates = KnownEstimates(task, setting.launch, estimates.on_estimate)
            setting = replace(setting, task=task, estimates=estimates)
        for strategies in way.strategies:
            if strategies != setting.strategies:
                setting = replace(setting, strategies=strategies)
            candidate = setting.best(self.loss)
            if candidate.fits or not setting.has_room:
                break
        return setting, candidate

    @property
    def _obstacles(self) -> set[str]:
        launch, task, planned = self.whole.launch, self.whole.task, self.found.get(PLANNED)
        holds = {
            CPU: launch.target.device.type == "cpu",
            FP16: launch.mixed_precision == "fp16",
            DIVIDED: self.whole.layouts[-1].accumulation_steps * launch.num_processes > 1,
            NO_ADAPTERS: not (self.takes_adapters and task.takes_adapters),
            ANOTHER_RULE: task.optim.optimizer != "adamw",
            NO_PLAN: planned is not None and planned.strategy == PLAIN,
        }
        return {name for name, is_so in holds.items() if is_so}

    def _fits(self, name: str) -> bool:
        return name in self.found and self.found[name].fits

    def _is_faster(self, candidate: Candidate) -> bool:
        """Return whether a candidate is faster than a plan without further flags, if that fits."""
        planned = self.found.get(PLANNED, candidate)
        return not planned.fits or (candidate.fits and candidate.step_s < (1 - AS_FAST) * planned.step_s)


def _on_several(rung: Rung, setting: Setting) -> Iterator[Rung]:
    """Yield the rungs with the same micro-batches on several devices, if there are as many."""
    layout = rung.candidate.layout
    for count in CARDS:
        if count <= layout.accumulation_steps and setting.task.run.micro_batch_size == AUTO:
            shared = BatchLayout.of(layout.global_batch_size, layout.micro_batch_size, count)
            wider = replace(setting, launch=setting.launch.over(count))
            found = wider.best(rung.candidate.loss, shared)
            yield replace(rung, name=f"{count} cards", num_processes=count, candidate=found)


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
    ways, known = Ladder(whole, read, takes_adapters, task.losses[0]), list[tuple[Rung, Iterator[Rung]]]()
    with ExitStack() as processes:
        for rungs in ways.ways(processes):
            if (rung := next(rungs, None)) is not None:
                ways.found[rung.name] = rung.candidate
                known.append((rung, rungs))
                yield rung
        if (best := best_rung([rung for rung, _ in known])) is not None:
            yield from next(wider for rung, wider in known if rung is best)
    if best is None or best.changes != SAME_CURVE:
        yield from _in_shards(whole, read)


def _in_shards(whole: Setting, read: Callable[[Sequence[str]], Task]) -> Iterator[Rung]:
    """Yield a rung for each number of devices, up to as many as suffice."""
    launch = whole.launch
    if launch.target.device.type == "cpu" or launch.mixed_precision == "fp16" or not whole.task.optim.goes_in_shards:
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
