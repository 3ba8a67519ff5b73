"""The model of a run: built on its device, prepared for its ranks, and under the plan of the flags."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_recipes.core.activations import PlanHandle
from memsave_recipes.core.activations.streaming import leave_to_this_rank, place, stream_of
from memsave_recipes.core.costs.preserve_state import preserve_state
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.step import masters_of, scale_on_host
from memsave_recipes.core.planner.budget import can_compile
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.sharding import ShardGroups, shard
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.sharding.shards import reduce_once_a_step
from memsave_recipes.core.sharding.units import joint_blocks
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.step.memory import keeps_masters
from memsave_recipes.core.step.settings import AUTO, REGIONS
from memsave_recipes.models.slices import let_go_of_stand_ins, slices_of
from memsave_recipes.run.folder import print_lines
from memsave_recipes.run.joined import JoinedRun
from memsave_recipes.run.run_plan import RunPlan, choose_by_estimates, host_of, plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.run.verification import settle_kernels, verify_plan
from memsave_recipes.tools.fit.advice import reduction_line
from memsave_recipes.training.arguments import STEPS_THAT_PAY
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch.distributed import on_main_process
from memsave_recipes.training.launch.float8 import FLOAT8, measured_ratios, settle_float8
from memsave_recipes.training.launch.start import (
    describe_float32,
    refuse_gradients,
    synchronize_batchnorm,
    unused_weights,
)
from memsave_recipes.training.optimizers import describe_lost_updates, describe_state_in_shards, describe_warm_up

COMPILED = "regions; compiled layers round otherwise than eager ones, which --compile none keeps"


class Built:
    """The model of a task on its device, and what is found for it. All methods are for all ranks.

    Attributes:
        bare: the module with the blocks.
        trained: the module around it that is trained; often the same.
        saved: the module whose weights are saved, such as peft's.
        loss_of: the loss of a micro-batch, summed, by the module that Accelerate has prepared.
        planned: the plan and how it was found, once chosen.
    """

    def __init__(
        self,
        run: JoinedRun,
        task: Task,
        batches: GlobalBatches,
        settle: Callable[[Any], Iterable[str | None] | None] | None,
    ) -> None:
        """Build, place, settle and check; with ``--shard`` cut the weights up. ``Run.build`` says what it raises."""
        self.run, self.batches = run, batches
        args, accelerator, groups = run.args, run.accelerator, run.groups
        slices_on = None if groups is None else accelerator.device
        self.bare: nn.Module = task.build_model(with_weights=True, slices_on=slices_on)
        if args.batchnorm == "sync":
            self.bare = synchronize_batchnorm(self.bare, accelerator.device)
        self.saved: Any = task.adapt(self.bare)
        if task.check_samples is not None:  # the planner leaves out micro-batches that are too small
            task.check_samples(self.bare, 2 if args.micro_batch_size == AUTO else batches.smallest_micro_batch)
        place(self.bare, accelerator.device, streamed=task.optim.streamed)
        with accelerator.autocast():  # flash attention refuses float32
            lines = None if settle is None else settle(self.bare)
            self.trained: nn.Module = task.trained(self.bare, None, accelerator.device)
        if stream_of(self.bare) is None:
            self.trained.to(accelerator.device)
        print_lines(accelerator, *filter(None, lines or ()))
        self.task = self._with_compile(task)
        args = run.args
        args.convert(self.bare)
        args.check_model(self.bare)
        by_estimates = groups is not None or batches.layout.sequence_parallel > 1
        self._found = choose_by_estimates(accelerator, self.task) if args.searches and by_estimates else None
        if groups is not None:
            self._shard(groups)
        elif accelerator.num_processes > 1:
            unused = self._unused_weights()
            refuse_gradients(unused)
            leave_to_this_rank(self.trained, unused)
        if accelerator.mixed_precision == FLOAT8:
            self._settle_float8()
        self._host = host_of(accelerator, self.task, self.bare, batches.layout)

    def choose_plan(self, model: nn.Module, optimizer: Optimizer) -> Plan:
        """Choose as ``Run.choose_plan`` does."""
        args, accelerator = self.run.args, self.run.accelerator
        if masters_of(optimizer) is not None:
            scale_on_host(accelerator.scaler)
        self.loss_of: Callable[[Batch], Tensor] = partial(self.task.loss_of, model)
        print_lines(accelerator, *filter(None, self._notices()))
        step = StepOnDevice(accelerator, self.bare, self.batches, model, self.loss_of)
        self.planned = plan_run(self.task, step, self._found, self._host)
        args.check_plan(self.planned.plan)
        if self.run.groups is not None:
            self._settle_shards(model, self.planned)
        return self.planned.plan

    def verify(self, model: nn.Module, handle: PlanHandle) -> dict[str, Any]:
        """Carry out ``--verify`` and ``--full_determinism``; return the former's entry of ``results.json``."""
        args, accelerator, batches = self.run.args, self.run.accelerator, self.batches
        found = verify_plan(args.verify, accelerator, model, handle, batches, self.loss_of)
        settle_kernels(args.full_determinism, accelerator, model, batches, self.loss_of)
        return found

    def _with_compile(self, task: Task) -> Task:
        """Settle ``--compile auto``; return the task with these flags.

        It takes a GPU, its compiler, layers that repeat, and a run of ``STEPS_THAT_PAY``.
        """
        run = self.run
        if run.args.compile != AUTO:
            return task
        accelerator, on_cuda = run.accelerator, run.accelerator.device.type == "cuda"
        pays = self.batches.num_steps >= STEPS_THAT_PAY
        compiles = on_main_process(accelerator, lambda: on_cuda and pays and can_compile(self.bare))
        run.args = replace(run.args, compile=REGIONS if compiles else NONE)
        run.flags["compile"] = run.args.compile
        if on_cuda:
            short = "" if pays else f"; {self.batches.num_steps} steps do not pay for compiling"
            accelerator.print(f"--compile auto: {COMPILED if compiles else NONE + short}")
        return replace(task, run=run.args)

    def _shard(self, groups: ShardGroups) -> None:
        """Cut the weights up, in units of the plan that the flags name or that was found for a budget."""
        args, accelerator, found = self.run.args, self.run.accelerator, self._found
        plan = args.named_plan(self.bare) if found is None else found.forecast.plan
        if args.verify == "stop" and not plan.is_bitwise:
            raise InputError(
                f"--verify: plan {plan.strategy} rounds in another order, so it is compared with a step in float64, "
                f"which weights under --shard {args.shard} do not take: leave --verify out, or take a plan that keeps "
                "every bit, such as full or budget:bitwise"
            )
        device, unread = accelerator.device, slices_of(self.bare).unread
        with_masters = keeps_masters(args, device)
        shard(self.trained, self.bare, plan, groups, device, args.shard, unread, with_masters=with_masters)
        let_go_of_stand_ins(self.bare)
        self._joint_blocks = joint_blocks(plan)
        accelerator.print(groups.describe())

    def _unused_weights(self) -> dict[str, nn.Parameter]:
        with preserve_state(self.trained, self.run.accelerator.device):
            return unused_weights(self.trained, self._largest_forward())

    def _largest_forward(self) -> Callable[[], Tensor]:
        """Return that of a step, before Accelerate has prepared the model."""
        make_batch = self.batches.largest_forward(self.batches.layout)

        def forward() -> Tensor:
            with self.run.accelerator.autocast():
                return self.task.loss_of(self.trained, make_batch())

        return forward

    def _settle_float8(self) -> None:
        """Multiply in float8 where that is faster on the first rank, or as the run did that is resumed."""
        run, accelerator, earlier = self.run, self.run.accelerator, self.run.earlier or {}
        compiles = run.args.may_compile_on(accelerator.device)
        ratios = earlier.get("float8_ratios")
        if not earlier and self.batches.num_steps:
            with preserve_state(self.trained, accelerator.device):
                ratios = measured_ratios(accelerator, self.trained, self._largest_forward(), compiles=compiles)
        run.flags["float8_ratios"] = ratios
        accelerator.print(settle_float8(accelerator, self.trained, ratios, compiles=compiles))

    def _notices(self) -> list[str | None]:
        accelerator, args = self.run.accelerator, self.run.args
        dtypes = {parameter.dtype for parameter in self.bare.parameters()}
        return [
            describe_state_in_shards(args, self.bare),
            describe_lost_updates(args, self.bare),
            describe_warm_up(args, self.batches.steps.stop),
            describe_float32(accelerator.device, dtypes, accelerator.mixed_precision),
        ]

    def _settle_shards(self, model: nn.Module, planned: RunPlan) -> None:
        """Reduce gradients as planned, in the units that the weights are cut in."""
        args, once = self.run.args, planned.reduces_once
        if joint_blocks(planned.plan) != self._joint_blocks:
            raise InputError(
                f"--shard {args.shard}: not all blocks of plan {planned.plan.strategy} run, so its spans are others "
                "than the units of the weights: take full"
            )
        reduce_once_a_step(model, once)
        self.run.flags["reduces_once"] = once
        if self.batches.layout.accumulation_steps > 1:
            self.run.accelerator.print(reduction_line(once=once))
