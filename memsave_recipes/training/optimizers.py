"""The optimizer and the learning-rate schedule that the flags name."""

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from memsave_recipes.training.arguments import OptimizerArguments


def make_optimizer(optim: OptimizerArguments, model: nn.Module) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101) or SGD over all parameters."""
    lr, weight_decay = optim.learning_rate, optim.weight_decay
    if optim.optimizer == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=optim.momentum, weight_decay=weight_decay)
    return AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def make_scheduler(optim: OptimizerArguments, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    """Linear warm-up, then the named schedule over ``num_steps`` optimizer steps."""
    return get_scheduler(optim.lr_scheduler_type, optimizer, optim.warmup_steps, num_steps)
