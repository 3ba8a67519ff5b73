"""DeepSpeed's tiled MLPs and tiled loss for a Llama, as a peer of our plans.

    pip install deepspeed

The parts of ALST (https://arxiv.org/abs/2506.13996) that need no second GPU, with as many tiles as its documentation
takes: one for every ``hidden_size`` tokens.
"""

from functools import partial
from importlib.util import find_spec
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

IS_INSTALLED = find_spec("deepspeed") is not None


def tile_mlps(model: LlamaForCausalLM) -> None:
    """Give the MLPs of ``model`` forwards that go tile by tile."""
    for layer in model.model.layers:
        layer.mlp.forward = partial(_tiled_mlp, layer.mlp)


def _tiled_mlp(mlp: nn.Module, hidden: Tensor) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    tiled: Tensor = TiledMLP.apply(type(mlp).forward, mlp, hidden, _num_tiles(hidden), list(mlp.parameters()))
    return tiled


def tiled_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The mean loss of the next tokens; its gradients of the head and of what it is given are made with it.

    Args:
        tokens: (B, T).
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    class Loss(TiledFusedLogitsLoss):  # type: ignore[misc, no-any-unimported]
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            """The gradient as it is: the one that comes in is 1, which fake tensors could not tell."""
            return None, None, ctx.saved_tensors[0], *(None,) * 5

    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    targets = tokens[:, 1:]

    def loss_of(head: nn.Module, rows: Tensor, targets_of_rows: Tensor) -> Tensor:
        return cross_entropy(head(rows).float(), targets_of_rows, reduction="sum") / targets.numel()

    weights = list(model.lm_head.parameters())
    loss: Tensor = Loss.apply(loss_of, model.lm_head, hidden, targets, None, _num_tiles(hidden), weights, "sum")
    return loss


def _num_tiles(hidden: Tensor) -> int:
    return ceil(hidden.shape[-2] / hidden.shape[-1])
