"""Trainings of small models in float64, as a run of a recipe trains: whole on one rank, or in shards on several."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.sharding import ShardGroups, shard, whole
from memsave_recipes.core.sharding.shards import reduce_once_a_step
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.image_classifiers import MODELS
from memsave_recipes.models.packed_attention import set_packed_attention
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints import Checkpoints, TrainState
from memsave_recipes.training.optimizers import (
    clip_gradients,
    make_optimizer,
    make_scheduler,
)

WORLDS = {"1": (1, "none"), "2": (2, "full"), "3": (3, "full"), "4": (4, "full"), "2x2": (4, "2"), "ddp2": (2, "none")}
"""Numbers of ranks, and values of ``--shard``."""
VOCABULARY, LENGTH = 67, 16  # rows that neither 2, 3 nor 4 ranks divide
NOISE = 1e-12
LANGUAGE_MODELS = ("llama", "tied_llama", "gpt2", "wide_gpt2")


def build_model(kind, dtype=torch.float64):
    """Always with the same weights, and without dropout, which follows the layout of a batch."""
    torch.manual_seed(0)
    return BUILDERS[kind]().to(dtype).train()


def _llama(*, tied=False):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def _gpt2():
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_layer=4, n_head=4, n_embd=16, n_positions=LENGTH, **no_dropout)
    )


def _wide_gpt2():
    """Whose large matrices are whole blocks of 256 numbers in halves, and not all of them in thirds."""
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=64, n_positions=LENGTH, **no_dropout)
    )


def _vit():
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            num_labels=5,
        )
    )


def _resnet():
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2], layer_type="basic", num_labels=5)
    )


BUILDERS = {
    "llama": _llama,
    "tied_llama": partial(_llama, tied=True),
    "gpt2": _gpt2,
    "wide_gpt2": _wide_gpt2,
    "vit": _vit,
    "resnet": _resnet,
    "vgg": partial(MODELS["vgg_small"], num_classes=5),
    "densenet": partial(MODELS["densenet_small"], num_classes=5),
}


class Rows(Dataset):
    """Random tokens; of row i only the first few have a label, how many depends on i."""

    def __getitem__(self, key):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(key.index))
        labels = tokens.clone()
        labels[2 + 5 * key.index % (LENGTH - 2) if key.counted else 0 :] = IGNORED_LABEL
        return {"input_ids": tokens, "labels": labels}


class Images(Dataset):
    """Noise."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __getitem__(self, key):
        generator = torch.Generator().manual_seed(key.index)
        image = torch.randn(3, 16, 16, generator=generator, dtype=torch.float64).to(self.dtype)
        label = key.index % 5 if key.counted else IGNORED_LABEL
        return {"pixel_values": image, "labels": torch.tensor(label)}


def count_valid(batch):
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


def image_loss(model, pixel_values, labels):
    output = model(pixel_values)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


@dataclass
class Training:
    """A model with its optimizer, prepared as ``Run.prepare`` does; ``trained`` is what a step calls."""

    accelerator: object
    kind: str
    shard: str = "none"
    strategy: str = "none"
    dtype: torch.dtype = torch.float64
    loss: str = "full"
    lora: bool = False
    reduces_once: bool = False
    by_document: bool = False
    optim: OptimizerArguments = None
    global_batch_size: int = 10
    num_steps: int = 20

    def __post_init__(self):
        self.optim = self.optim or OptimizerArguments(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        model = self.model = build_model(self.kind, self.dtype)
        if self.lora:
            self.saved = add_lora(model, LoraArguments(lora=True, lora_rank=3), task_type="CAUSAL_LM")
            model.to(self.dtype)
        if self.by_document:
            set_packed_attention(model, "document")
        is_language = self.kind in LANGUAGE_MODELS
        trained = CausalLMLoss(model, self.loss, chunk_bytes=4 * VOCABULARY * 8) if is_language else model
        self.plan = plan_blocks(model, self.strategy)
        groups = ShardGroups.of(self.shard, self.accelerator.num_processes)
        if groups is not None:
            shard(trained, model, self.plan, groups, self.accelerator.device, self.shard)
            reduce_once_a_step(trained, self.reduces_once)
        optimizer = make_optimizer(self.optim, model)
        self.scheduler = make_scheduler(self.optim, optimizer, self.num_steps)
        if groups is None:
            self.trained, self.optimizer = self.accelerator.prepare(trained, optimizer)
        else:
            self.trained = self.accelerator.prepare_model(trained, device_placement=False, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.handle = apply_plan(model, self.plan)
        self.batches = self._batches(is_language)
        self.norms = []

    def _batches(self, is_language):
        return GlobalBatches(
            self.accelerator,
            Rows() if is_language else Images(self.dtype),
            order=SampleOrder(num_samples=4 * self.global_batch_size, global_batch_size=self.global_batch_size, seed=0),
            layout=BatchLayout.of(self.global_batch_size, 2, self.accelerator.num_processes),
            num_steps=self.num_steps,
            seed=0,
            count_valid=count_valid if is_language else None,
        )

    def loss_of(self, micro_batch):
        if self.kind in LANGUAGE_MODELS:
            lengths = [[LENGTH]] * len(micro_batch["labels"]) if self.by_document else None
            return self.trained(**micro_batch, document_lengths=lengths)
        return image_loss(self.trained, **micro_batch)

    def forward_and_backward(self, batch):
        for micro_batch in batch.forwards(self.trained):
            loss_sum = self.loss_of(micro_batch)
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))

    def train(self, num_steps=None):
        """All steps of the run, or so many."""
        for batch, _ in zip(self.batches, range(num_steps or self.num_steps), strict=False):
            self.forward_and_backward(batch)
            norm = clip_gradients(self.optim, self.accelerator, self.trained)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.norms.append(norm.item())
        return self

    def weights(self):
        """Whole, on every rank."""
        return {name: whole(p.detach()).clone() for name, p in self.model.named_parameters()}

    def gradients(self):
        """Those of this rank's parts."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: getattr(grad, "to_local", lambda grad=grad: grad)().clone() for name, grad in found.items()}

    def state(self):
        """The optimizer's, whole, by parameter and name."""
        state = self.optimizer.state_dict()["state"]
        return {(number, key): whole(value).clone() for number, entry in state.items() for key, value in entry.items()}


def checkpoints_of(training, folder):
    """Those of a training, in this folder."""
    state = TrainState(training.accelerator, training.trained, training.optimizer, training.scheduler)
    order, layout = training.batches.order, training.batches.layout
    return Checkpoints(training.accelerator, folder, state, order=order, layout=layout)


def trained_weights(kind, flag, accelerator, **options):
    """The weights and gradient norms of a run, and the buffers of this rank."""
    training = Training(accelerator, kind, flag, **options).train()
    buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    return training.weights(), training.norms, buffers


def largest_difference(ours, theirs):
    """Of all tensors, relative to the largest value of each.

    Those of nothing but noise count as they are: the key biases of attention begin at zero, and so are their gradients
    but for rounding.
    """
    assert ours.keys() == theirs.keys()
    sizes = {name: theirs[name].abs().max().item() for name in theirs}
    scales = {name: size if size > NOISE else 1.0 for name, size in sizes.items()}
    return max((ours[name] - theirs[name]).abs().max().item() / scales[name] for name in ours)


def all_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
