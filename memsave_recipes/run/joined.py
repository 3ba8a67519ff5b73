"""What ranks that have joined a run share: its flags, its folder and its global batches."""

from math import ceil
from pathlib import Path
from typing import Any

from memsave_recipes.core.sharding import ShardGroups
from memsave_recipes.core.sharding.groups import check_precision
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.run.folder import PLAN, earlier_names, print_lines
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints import RunLock
from memsave_recipes.training.checkpoints.resume import with_previous_plan
from memsave_recipes.training.launch.processes import StopSignals, num_workers
from memsave_recipes.training.launch.start import Accelerator
from memsave_recipes.training.optimizers import check_in_backward, check_offload
from memsave_recipes.training.parsing import flag_values


class JoinedRun:
    """A run that the ranks have joined. All methods are for all ranks.

    Attributes:
        args: the recipe's flags; on a resumed run with the plan and micro-batch size that were found before.
        flags: those of ``config.json``.
        path: the folder that the run has to itself.
        earlier: ``config.json`` of the run that is resumed; ``None`` where none is.
        signals: those that ask the run to stop.
        groups: of the ranks that share the weights; ``None`` where each has them whole.
    """

    def __init__(
        self,
        args: Any,
        recipe: str,
        accelerator: Accelerator,
        path: Path,
        *,
        earlier: dict[str, Any] | None,
        signals: StopSignals,
        lock: RunLock,
    ) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.path, self.earlier, self.signals, self.lock = path, earlier, signals, lock
        self.flags = flag_values((args,))
        self.args = args
        if earlier is not None:
            names, notices = earlier_names(earlier, self.flags)
            print_lines(accelerator, *notices)
            self.flags |= names
            plan, num_processes = path / PLAN, accelerator.num_processes
            self.args = with_previous_plan(args, earlier, plan=plan, num_processes=num_processes)
        self.num_workers = num_workers(args.dataloader_num_workers, accelerator)
        self.groups = ShardGroups.of(args.shard, accelerator.num_processes)
        if self.groups is not None:
            check_precision(args.shard, accelerator.mixed_precision)
        layout = self.args.layout(accelerator.num_processes)
        check_offload(args, layout)
        check_in_backward(args, layout, accelerator.mixed_precision)

    def global_batches(self, dataset: Any, **options: Any) -> GlobalBatches:
        """Make the global batches of ``Run.global_batches``."""
        args = self.args
        order = SampleOrder(num_samples=len(dataset), global_batch_size=args.global_batch_size, seed=args.seed)
        layout = args.layout(self.accelerator.num_processes)
        args.check_order(order, layout)
        return GlobalBatches(
            self.accelerator,
            dataset,
            order=order,
            layout=layout,
            num_steps=0 if args.eval_only else args.max_steps or ceil(args.num_epochs * order.steps_per_epoch),
            seed=args.seed,
            num_workers=self.num_workers,
            **options,
        )
