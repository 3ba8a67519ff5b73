"""Rank 0 of any number of ranks, in one process: torch's ``fake`` group has real tensors, and idle collectives."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

import torch
import torch.distributed as dist
import torch.nn.functional as F
from host_copies import HostCopies, moving_everything
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from workloads import estimate_on_target, peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.breakdown import persistent_tensors
from memsave_recipes.core.costs.estimate import SimulatedCopies, fake_batch, fake_model
from memsave_recipes.core.costs.fake_step import SimulatedClock
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.planner.budget import Forecast, InShards, static_memory_of
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES, TILED_STRATEGIES
from memsave_recipes.core.plans.shards import Shards
from memsave_recipes.core.sharding import ShardGroups, shard
from memsave_recipes.core.sharding.shards import reduce_once_a_step
from memsave_recipes.core.sharding.units import modules_outside_blocks, sharded_units
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.training.arguments import DTYPES, OptimizerArguments
from memsave_recipes.training.optimizers import make_optimizer

VOCABULARY = 1003  # rows that no number of ranks but 1 divides
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 168}


@contextmanager
def fake_ranks(num_ranks):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _llama(*, tied=False, lora=False):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            use_cache=False,
            **SIZES,
        )
    )
    if lora:
        add_lora(model, LoraArguments(lora=True, lora_rank=4), task_type="CAUSAL_LM")
    return model


def _gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_layer=5, n_head=4, n_embd=64, n_positions=128, use_cache=False)
    )


def _bert():
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **SIZES))


def _vit():
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=5, **SIZES))


LANGUAGE_MODELS = {
    "llama": _llama,
    "tied_llama": partial(_llama, tied=True),
    "gpt2": _gpt2,
    "lora": partial(_llama, lora=True),
}
CLASSIFIERS = {
    "bert": _bert,
    "vit": _vit,
    "vgg": partial(MODELS["vgg_small"], num_classes=5),
    "densenet": partial(MODELS["densenet_small"], num_classes=5),
}
BUILDERS = LANGUAGE_MODELS | CLASSIFIERS


class OptimizerOfMasters(OptimizerArguments):
    """With ``--dtype bfloat16_master``."""

    has_masters = True


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A step of a rank."""

    kind: str
    num_ranks: int
    strategy: str
    flag: str = "full"
    rows: int = 2
    length: int = 64
    bf16: bool = False
    loss: str = "full"
    num_micro_batches: int = 1
    optimizer: str = "adamw"
    dtype: str = "float32"
    reduces_once: bool = False

    def __str__(self):
        words = [self.kind, self.num_ranks, self.flag, self.strategy, f"{self.rows}x{self.length}", self.loss]
        words += ["bf16"] * self.bf16 + [f"{self.num_micro_batches}micro"] + [self.optimizer]
        words += [self.dtype] if self.dtype != "float32" else []
        words += ["once"] * self.reduces_once
        return "-".join(map(str, words))

    @property
    def optim(self):
        kind = OptimizerOfMasters if self.dtype == "bfloat16_master" else OptimizerArguments
        return kind(optimizer=self.optimizer, weight_decay=0.1)

    @property
    def groups(self):
        return ShardGroups.of(self.flag, self.num_ranks)

    def build(self):
        return BUILDERS[self.kind]().to(DTYPES[self.dtype]).train()

    def trained(self, model):
        if self.kind in CLASSIFIERS:
            return model
        return CausalLMLoss(model, self.loss, chunk_bytes=4 * VOCABULARY * 32)

    def batch(self, device=CPU):
        tokens = torch.zeros(self.rows, self.length, dtype=torch.int64, device=device)
        if self.kind in LANGUAGE_MODELS:
            return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": torch.zeros_like(tokens)}
        labels = torch.zeros(self.rows, dtype=torch.int64, device=device)
        if self.kind == "bert":
            return {"input_ids": tokens, "position_ids": torch.zeros_like(tokens), "labels": labels}
        return {"images": torch.zeros(self.rows, 3, 32, 32, device=device), "labels": labels}

    def loss_of(self, trained, batch):
        if self.kind in LANGUAGE_MODELS:
            return trained(**batch)
        inputs = dict(batch)
        labels = inputs.pop("labels")
        output = trained(**inputs) if self.kind == "bert" else trained(inputs["images"])
        return F.cross_entropy(getattr(output, "logits", output), labels, reduction="sum")

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16, cache_enabled=False)


def predicted(shape):
    """The point of the step at which most is live, by the formula."""
    model, plan, chain, _ = _costs(shape)
    groups, static = shape.groups, static_memory(shape, model)
    shards = Shards(
        units=sharded_units(model, plan, groups.size, shape.flag, CPU, with_masters=shape.optim.has_masters),
        num_ranks=groups.size,
        num_replicas=groups.num_replicas,
        accumulates=shape.num_micro_batches > 1,
    )
    in_shards = InShards(of_plan=lambda plan: shards, bytes_per_s=1.0)
    if shape.reduces_once:
        in_shards, static = in_shards.reduced_once(static, shape.num_micro_batches)
    return Forecast(plan=plan, chain=static.added_to(chain), in_shards=in_shards).peak


def set_aside_bytes(shape):
    """Of a plan that offloads, for copies under way."""
    _, _, chain, workload = _costs(shape)
    return chain.resident_bytes - workload.resident_bytes


def _costs(shape):
    """The model, the plan, the costs of a micro-batch under it, and its workload."""
    measures_itself = shape.strategy.startswith((*OFFLOADING_STRATEGIES, *TILED_STRATEGIES))
    action = shape.strategy if measures_itself else "selective"
    with moving_everything(SimulatedCopies(SimulatedClock(), inf)):
        model, measured = _measured(shape.kind, shape.rows, shape.length, shape.bf16, shape.loss, shape.dtype, action)
        plan = plan_blocks(model, shape.strategy)
        return model, plan, measured.chain_under(plan), measured.workload


def static_memory(shape, model=None):
    """Of rank 0, by the formula."""
    samples = shape.rows * shape.num_micro_batches * shape.num_ranks
    layout = BatchLayout.of(samples, shape.rows, shape.num_ranks)
    model = fake_model(shape.build) if model is None else model
    return static_memory_of(shape.optim, model, layout, num_shards=shape.groups.size)


def measured_update_bytes(shape):
    """The most that the second update takes on rank 0, besides what is there before it."""
    torch.manual_seed(0)
    with fake_ranks(shape.num_ranks):
        model = shape.build()
        shard(shape.trained(model), model, plan_blocks(model, shape.strategy), shape.groups, CPU, shape.flag)
        optimizer = make_optimizer(shape.optim, model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()

        return peak_bytes(optimizer.step)


@cache
def _measured(kind, rows, length, bf16, loss, dtype, action):
    """Of a micro-batch under no plan and with all blocks under an action, whatever the number of ranks."""
    shape = Shape(kind=kind, num_ranks=2, strategy="none", rows=rows, length=length, bf16=bf16, loss=loss, dtype=dtype)
    model = fake_model(shape.build)
    trained, batch = shape.trained(model), fake_batch(model, shape.batch(torch.device("meta")))
    workload = workload_of(model, lambda _, batch: shape.loss_of(trained, batch), batch)
    workload = replace(workload, extra_modules=modules_outside_blocks(model))
    plans = [plan_blocks(model, strategy) for strategy in ("none", action)]
    autocast_dtype = torch.bfloat16 if bf16 else None
    return model, estimate_on_target(workload, plans, this_cpu(), autocast_dtype=autocast_dtype)


this_cpu = cache(partial(find_target, "cpu"))


def measured_bytes(shape):
    """The most that is live on rank 0 in a step after two others, by the profile of its allocations."""
    torch.manual_seed(0)
    with fake_ranks(shape.num_ranks):
        model = shape.build()
        trained, batch, plan = shape.trained(model), shape.batch(), plan_blocks(model, shape.strategy)
        shard(trained, model, plan, shape.groups, CPU, shape.flag, with_masters=shape.optim.has_masters)
        reduce_once_a_step(trained, shape.reduces_once)
        optimizer = make_optimizer(shape.optim, model)

        def forward_and_backward():
            with shape.autocast():
                loss = shape.loss_of(trained, batch)
            loss.backward()

        def step(meter=None):
            for number in range(1, shape.num_micro_batches + 1):
                with trained.no_sync() if number < shape.num_micro_batches else nullcontext():
                    forward_and_backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if meter is not None:
                meter.mark()

        with moving_everything(HostCopies()), apply_plan(model, plan):
            for _ in range(2):
                step()
            stays = [size for label in persistent_tensors(model, optimizer) for size in label.storages.values()]
            rise = DeviceInstruments(CPU).read_memory(step)[-1].peak_bytes
        return sum(stays) + sum(tensor.nbytes for tensor in batch.values()) + rise
