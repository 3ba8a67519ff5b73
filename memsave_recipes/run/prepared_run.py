"""The second phase of a run: Accelerate has prepared the model, and its plan is applied and proven."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.streaming import leave_to_this_rank, resident_tensors, stream_of
from memsave_recipes.core.costs.preserve_state import preserve_state
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.step import masters_of, scale_on_host
from memsave_recipes.core.planner.budget import can_compile
from memsave_recipes.core.planner.search import Candidate, reduction_line
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.sharding import ShardGroups, is_sharded, shard
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.sharding.shards import reduce_once_a_step
from memsave_recipes.core.sharding.units import joint_blocks
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.step.settings import AUTO, PER_MICRO_BATCH, PER_STEP
from memsave_recipes.models.adapters import check_merging
from memsave_recipes.models.slices import let_go_of_stand_ins, slices_of
from memsave_recipes.run.folder import print_lines
from memsave_recipes.run.open_run import OpenRun
from memsave_recipes.run.run_plan import choose_by_estimates, host_budget_of, plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.run.verification import settle_kernels, verify_plan
from memsave_recipes.training.arguments import REGIONS
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch.distributed import on_main_process
from memsave_recipes.training.launch.start import describe_float32, refuse_gradients, unused_weights
from memsave_recipes.training.optimizers import (
    describe_lost_updates,
    describe_state_in_shards,
    describe_warm_up,
    make_optimizer,
    make_scheduler,
)


class PreparedRun:
    """A model that Accelerate has prepared, under its plan. All methods are for all ranks.

    Attributes:
        model: what is trained, as Accelerate prepares it.
        optimizer: as Accelerate prepares it, over the parameters that require gradients.
        scheduler: as torch has it: Accelerate's would move it once for every rank.
        unwrapped: the module with the blocks, inside ``model``.
        loss_of: the loss of a micro-batch, summed.
        planned: the plan and how it was found; ``handle`` takes it off.
        equivalence: what ``--verify`` found, for ``results.json``.
    """

    def __init__(self, run: OpenRun, task: Task, batches: GlobalBatches, model: nn.Module, trained: nn.Module) -> None:
        """Prepare, plan and prove; ``Run.prepare`` says what it raises."""
        self.run, self.batches, self.unwrapped = run, batches, model
        if run.args.compile == AUTO:
            task = self._with_compile(task)
        args, accelerator, groups = run.args, run.accelerator, run.groups
        args.convert(model)
        args.check_model(model)
        by_estimates = groups is not None or batches.layout.sequence_parallel > 1
        found = choose_by_estimates(accelerator, task) if args.searches and by_estimates else None
        if groups is not None:
            self._shard(trained, groups, found)
        host_budget_bytes = host_budget_of(accelerator, task, model, batches.layout)
        optimizer, self.scheduler = self._make_optimizer()
        self.model, self.optimizer = self._prepare(trained, optimizer, partial(task.loss_of, trained))
        if masters_of(optimizer) is not None:
            scale_on_host(accelerator.scaler)
        loss_of = self.loss_of = partial(task.loss_of, self.model)
        if run.flags.get("lora_merge"):
            with preserve_state(self.model, accelerator.device):
                check_merging(model, lambda: loss_of(batches.largest_forward(batches.layout)()))
        step = StepOnDevice(accelerator, model, batches, self.model, loss_of)
        self.planned = plan_run(task, step, found, host_budget_bytes)
        args.check_plan(self.planned.plan)
        if groups is not None:
            self._settle_shards()
        self.handle = apply_plan(model, self.planned.plan)
        self.equivalence = verify_plan(args.verify, accelerator, self.model, self.handle, batches, loss_of)
        settle_kernels(args.full_determinism, accelerator, self.model, batches, loss_of)

    def _with_compile(self, task: Task) -> Task:
        """Settle ``--compile auto``: a GPU, its compiler and layers that repeat; return the task with these flags."""
        run, has_whole_rows = self.run, self.batches.layout.sequence_parallel == 1
        may_compile = run.accelerator.device.type == "cuda" and has_whole_rows
        compiles = on_main_process(run.accelerator, lambda: may_compile and can_compile(self.unwrapped))
        run.args = replace(run.args, compile=REGIONS if compiles else NONE)
        run.accelerator.print(f"--compile auto: {REGIONS if compiles else NONE}")
        return replace(task, run=run.args)

    def _shard(self, trained: nn.Module, groups: ShardGroups, found: Candidate | None) -> None:
        """Cut the weights up, in units of the plan that the flags name or that is ``found`` for a budget."""
        args, accelerator = self.run.args, self.run.accelerator
        plan = plan_blocks(self.unwrapped, args.activation_checkpointing) if found is None else found.forecast.plan
        if args.verify == "stop" and not plan.is_bitwise:
            raise InputError(
                f"--verify: plan {plan.strategy} rounds in another order, so it is compared with a step in float64, "
                f"which weights under --shard {args.shard} do not take: leave --verify out, or take a plan that keeps "
                "every bit, such as full or budget:bitwise"
            )
        shard(trained, self.unwrapped, plan, groups, accelerator.device, args.shard, slices_of(self.unwrapped).unread)
        let_go_of_stand_ins(self.unwrapped)
        self._joint_blocks = joint_blocks(plan)
        accelerator.print(groups.describe())

    def _make_optimizer(self) -> tuple[Optimizer, LRScheduler]:
        args, model = self.run.args, self.unwrapped
        layout = self.batches.layout
        leaves = (layout.num_processes == 1 or is_sharded(model)) and layout.needs_all_gradients is None
        optimizer = make_optimizer(args, model, seed=args.seed, leaves_in_backward=leaves)
        accelerator, dtypes = self.run.accelerator, {parameter.dtype for parameter in model.parameters()}
        num_steps = self.batches.steps.stop
        notices = [describe_state_in_shards(args, model), describe_lost_updates(args, model)]
        notices.append(describe_warm_up(args, num_steps))
        notices.append(describe_float32(accelerator.device, dtypes, accelerator.mixed_precision))
        print_lines(accelerator, *filter(None, notices))
        return optimizer, make_scheduler(args, optimizer, num_steps)

    def _prepare(
        self, trained: nn.Module, optimizer: Optimizer, loss_of: Callable[[Batch], Tensor]
    ) -> tuple[nn.Module, Optimizer]:
        accelerator = self.run.accelerator
        if self.run.groups is not None:  # as for evaluation: with autocast, and without a DDP around the shards
            model = accelerator.prepare_model(trained, device_placement=False, evaluation_mode=True)
            return model, accelerator.prepare_optimizer(optimizer)
        is_streamed = stream_of(self.unwrapped) is not None
        unused = self._unused_weights(trained, loss_of) if accelerator.num_processes > 1 else {}
        refuse_gradients(unused)
        leave_to_this_rank(trained, unused)
        reduces = any(tensor.requires_grad for tensor in resident_tensors(self.unwrapped))  # else DDP refuses
        model = accelerator.prepare_model(trained, device_placement=not is_streamed, evaluation_mode=not reduces)
        return model, accelerator.prepare_optimizer(optimizer)

    def _unused_weights(self, trained: nn.Module, loss_of: Callable[[Batch], Tensor]) -> dict[str, nn.Parameter]:
        accelerator = self.run.accelerator
        if stream_of(self.unwrapped) is None:
            trained.to(accelerator.device)
        make_batch = self.batches.largest_forward(self.batches.layout)
        with preserve_state(trained, accelerator.device), accelerator.autocast():
            return unused_weights(trained, lambda: loss_of(make_batch()))

    def _settle_shards(self) -> None:
        """Reduce gradients as planned (``--reduce_gradients``), in the units that the weights are cut in."""
        args, plan, once = self.run.args, self.planned.plan, self.planned.reduces_once
        if joint_blocks(plan) != self._joint_blocks:
            raise InputError(
                f"--shard {args.shard}: not all blocks of --activation_checkpointing {args.activation_checkpointing} "
                "run, so its spans are others than the units of the weights: take full"
            )
        reduce_once_a_step(self.model, once)
        self.run.chose(reduce_gradients=PER_STEP if once else PER_MICRO_BATCH)
        if self.batches.layout.accumulation_steps > 1:
            self.run.accelerator.print(reduction_line(once=once))
