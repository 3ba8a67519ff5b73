"""Update rules that are no single optimizer of torch: Muon with AdamW for the parameters that Muon is not for.

NOTE [ Muon ]
1. ``torch.optim.Muon`` (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) steps the weights of hidden
   linear layers, adapters among them. AdamW steps the rest: embeddings, the head, norms and biases, and weights that
   are not matrices, such as those of convolutions, which torch's Muon refuses.
2. Both have one learning rate and one weight decay. An update of Muon is scaled by ``0.2 * sqrt(max(rows, columns))``
   to the size of AdamW's, so that rates found for AdamW serve (``match_rms_adamw``, Liu et al. 2025,
   https://arxiv.org/abs/2502.16982). torch's default, ``original``, needs a rate of its own, and takes the rows of a
   weight for its outputs, which are the columns in GPT-2.
3. Momentum (0.95, Nesterov), the coefficients and the number of Newton-Schulz iterations are torch's defaults.
4. Muon takes no ``found_inf``, so the host waits for the norm of the gradient: rule 2 of NOTE [ not finite ].
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Muon for ``matrices`` and AdamW for ``others``, as one optimizer with a group of parameters for each."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        self._muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW([{"params": others}], lr=lr, weight_decay=weight_decay, fused=True)
        groups = [
            *({**group, "use_muon": True} for group in self._muon.param_groups),
            *({**group, "use_muon": False} for group in self._adamw.param_groups),
        ]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        parts: list[tuple[Optimizer, bool]] = [(self._muon, True), (self._adamw, False)]
        for optimizer, uses_muon in parts:
            optimizer.state = self.state  # both are others after load_state_dict, which Accelerate calls
            optimizer.param_groups = [group for group in self.param_groups if group["use_muon"] is uses_muon]
            optimizer.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers of ``model`` that train, without its head and those that are also an embedding."""
    from transformers.pytorch_utils import Conv1D  # slow to import

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    left_out = {layer.weight for layer in _head(model, layers)}
    left_out |= {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = dict.fromkeys(layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter))  # each once
    return [weight for weight in weights if weight.requires_grad and weight.ndim == 2 and weight not in left_out]


def _head(model: nn.Module, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Of the linear layers, those outside the body of a model of transformers; of another model, the last one."""
    from transformers import PreTrainedModel

    body = next((module.base_model for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    inside = set(body.modules())
    return [layer for layer in layers if layer not in inside] or layers[-1:]
