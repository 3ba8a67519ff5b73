"""What would fit where memory is too small: the planner's estimates in one line. They allocate nothing on a device."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.search import Candidate, Choice
from memsave_recipes.core.planner.task import Launch, Task, choose_for_target
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.core.text import format_bytes, gib_that_suffice, to_gib
from memsave_recipes.training.arguments import BUDGET_FLAG

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "--offload_optimizer state": {"offload_optimizer": "state"},
    "--optimizer adamw_8bit": {"optimizer": "adamw_8bit"},
    "--optimizer_in_backward --max_grad_norm 0": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
}
"""Flags that take less memory, with what they change of the optimizer."""
DEVICES = (2, 4, 8)


def budget_too_small(smallest: Candidate, task: Task, launch: Callable[[], Launch]) -> InputError:
    """Return the error for a budget that nothing fits in: the smallest that works, its largest use, and advice.

    Args:
        smallest: the candidate of ``task`` that needs least.
        launch: makes the devices that the advice is for.
    """
    if not smallest.fits_host:
        return HostUse.of(smallest).too_small
    largest, num_bytes = max(smallest.parts.items(), key=lambda part: part[1])
    line = (
        f"{BUDGET_FLAG} {to_gib(smallest.budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest.needed_bytes)} (--micro_batch_size {smallest.layout.micro_batch_size}, plan "
        f"{smallest.strategy}), {to_gib(num_bytes):.4g} of it for the {largest}"
    )
    with suppress(Exception):  # fake tensors cannot run every model; a missing advice must not hide the error
        line = f"{line}; {advice(task, launch(), smallest.budget_bytes)}"
    return InputError(line)


def advice(task: Task, launch: Launch, budget_bytes: int, *, less_than_now: bool = False) -> str:
    """Return the flags of the fastest way to train that is predicted to fit, or those that need less.

    Args:
        task: the recipe's, under the flags of the run that does not fit.
        less_than_now: leave out what needs as much as these flags: with them the run was out of memory.

    Raises:
        InputError: the recipe cannot be estimated with these flags.
    """
    run = task.run
    size = run.micro_batch_size if run.keeps_micro_batch else AUTO
    changes = {"activation_checkpointing": run.budget_strategy}
    opened = replace(task, run=run.with_micro_batch(size, budget_bytes, **changes))
    choice = choose_for_target(opened, launch, budget_bytes)
    chosen = (_needing_less(choice, task, launch) if less_than_now else choice).chosen
    if chosen is not None:
        return (
            f"the fastest that is predicted to fit in {format_bytes(budget_bytes)} (memsave plan): {_flags(chosen)}, "
            f"{format_bytes(chosen.needed_bytes)} in all"
        )
    needed = ((one.needed_bytes, flags) for flags, one in _other_ways(opened, launch, budget_bytes))
    helpful = sorted(pair for pair in needed if pair[0] < choice.smallest.needed_bytes)
    listed = ", ".join(f"{flags} {gib_that_suffice(num_bytes)}" for num_bytes, flags in helpful)
    nothing = f"no plan of this recipe is predicted to fit in {format_bytes(budget_bytes)}: "
    return nothing + (f"less is needed with {listed} GiB" if listed else "see memsave plan, and memsave fit")


def _other_ways(task: Task, launch: Launch, budget_bytes: int) -> Iterator[tuple[str, Candidate]]:
    """Yield other optimizers, and shards over as few devices as suffice, each with what needs least.

    Layers are eager ones, which need more: to compile them for each way takes minutes.
    """
    task = replace(task, run=replace(task.run, compile=NONE))

    def least(optim: dict[str, Any], run: dict[str, Any], launch: Launch) -> Candidate | None:
        with suppress(InputError):  # these flags do not go with the others
            changed = replace(task, optim=replace(task.optim, **optim), run=replace(task.run, **run))
            choice = choose_for_target(changed, launch, budget_bytes)
            return choice.chosen or choice.smallest
        return None

    for flags, optim in OPTIMIZERS.items():
        is_new = any(getattr(task.optim, name) != value for name, value in optim.items())
        if is_new and (found := least(optim, {}, launch)) is not None:
            yield flags, found
    if launch.num_processes == 1 and task.optim.goes_in_shards:
        for count in DEVICES:
            found = least({}, {"shard": "full"}, launch.over(count))
            if found is not None and found.fits:
                yield f"--shard full over {count} devices", found
                return


def _needing_less(choice: Choice, task: Task, launch: Launch) -> Choice:
    """Keep the candidates that need less than the flags of ``task``, if these are among them."""
    now = task.run.layout(launch.num_processes).micro_batch_size, task.run.activation_checkpointing
    same = [one.needed_bytes for one in choice.candidates if (one.layout.micro_batch_size, one.strategy) == now]
    limit = min(same, default=launch.target.memory_bytes + 1)
    return Choice(candidates=tuple(one for one in choice.candidates if one.needed_bytes < limit))


def _flags(candidate: Candidate) -> str:
    """Return the candidate as flags; a plan of the solver is made again, on the device."""
    flags = [f"--micro_batch_size {candidate.layout.micro_batch_size}"]
    flags.append(f"--activation_checkpointing {candidate.strategy}")
    if candidate.strategy == "budget":
        flags.append(f"{BUDGET_FLAG} {to_gib(candidate.budget_bytes):.4g}")
    if candidate.loss is not None:
        flags.append(f"--loss {candidate.loss}")
    return " ".join(flags)


@dataclass(frozen=True)
class HostUse:
    """What a rank moves to its host.

    Args:
        flags: that move it.
        ways: to move less.
    """

    flags: list[str]
    num_bytes: int
    host: Host
    ways: list[str]

    @classmethod
    def of(cls, candidate: Candidate) -> "HostUse":
        """Return that of a candidate: of its plan and its optimizer."""
        static, host = candidate.static, candidate.host
        found = cls([], 0, host, [])
        if static.host_bytes:
            found = cls.beside_plans(static.host_bytes, host)
        flags, ways = found.flags, found.ways
        if candidate.forecast.plan.offloads or not flags:
            flags = [f"--activation_checkpointing {candidate.strategy}", *flags]
            ways = ["full", "a smaller --micro_batch_size", *ways]
        return cls(flags, candidate.host_bytes, host, ways)

    @classmethod
    def beside_plans(cls, optimizer_bytes: int, host: Host) -> "HostUse":
        """Return that of an optimizer."""
        ways = ["--offload_optimizer none", "an optimizer with less state"]
        return cls(["--offload_optimizer"], optimizer_bytes, host, ways)

    @property
    def too_small(self) -> InputError:
        """The error for a host that has less."""
        moved, there = format_bytes(self.num_bytes), format_bytes(self.host.budget_bytes or 0)
        ways = ", or ".join([", ".join(self.ways[:-1]), self.ways[-1]] if self.ways[1:] else self.ways)
        return InputError(
            f"{' '.join(self.flags)}: a rank would move {moved} to its host, which has {there} available for it: "
            f"take {ways}"
        )

    @property
    def line(self) -> str:
        """How much it is, for people."""
        there = self.host.budget_bytes
        of = "" if there is None else f", of {format_bytes(there)} that are available to it"
        return f"{' '.join(self.flags)}: at most {format_bytes(self.num_bytes)} of the host's memory for a rank{of}"


def reduction_line(*, once: bool) -> str:
    """Say when the gradients of accumulated micro-batches are reduced, where weights are in shards."""
    when = "once a step, and whole on each rank until then" if once else "after every micro-batch"
    return f"gradients are reduced {when}"
