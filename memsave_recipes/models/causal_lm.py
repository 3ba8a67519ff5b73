"""A causal language model and its loss in one module: tokens in, summed loss out, with or without the logits.

One module, so that DDP, autocast and activation plans see the whole forward.

NOTE [ balanced experts ]
1. A mixture whose configuration has ``output_router_logits`` trains on its cross-entropy and ``router_aux_loss_coef``
   times a loss that balances its experts, which transformers computes in a forward with labels. This is the same.
2. It is no sum over tokens but of one forward: a micro-batch of one rank. It counts as many times as the forward has
   tokens that count, so a step has the mean of its forwards, weighted by tokens. It depends on the batch layout.
3. Evaluations leave it out, so their loss is the cross-entropy, which the perplexity needs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import (
    IGNORED_LABEL,
    TiedGradient,
    default_chunk_bytes,
    forward_of,
    linear_cross_entropy,
    num_chunks,
    pads_words,
    tied_gradient,
)
from memsave_recipes.core.text import printable_lines
from memsave_recipes.models.packed_attention import DocumentLengths, Documents, attends_by_document, evaluating
from memsave_recipes.models.pretrained import padding_known
from memsave_recipes.models.sequence_parallel import SequenceGroup

LossKind: TypeAlias = str
"""A value of ``--loss``, as ``read_loss`` takes it."""

LOSSES = ("auto", "chunked", "full", "liger")
MAX_CHUNK_TOKENS = 2**31


class CausalLMLoss(nn.Module):
    """Next-token cross-entropy, summed over the positions that count.

    Args:
        model: a transformers ``...ForCausalLM``. Of one that a ``SequenceGroup`` has adopted, the loss is that of this
            rank's slice of whole rows.
        loss: ``full`` makes all logits at once, ``chunked`` and ``liger`` (Liger Kernel's, on CUDA) never do;
            ``chunked:N`` has at most N tokens in a chunk; ``auto`` is chunked as soon as the logits are more than one
            chunk, or compiled, and the model's head allows it.

    Raises:
        InputError: no such loss; ``chunked`` or ``liger``, but the model computes its logits in an unknown way;
            ``liger`` without CUDA or liger-kernel.
    """

    def __init__(self, model: PreTrainedModel, loss: LossKind = "auto", chunk_bytes: int | None = None) -> None:
        super().__init__()
        loss, tokens = read_loss(loss)
        self.model = model
        self.loss = loss
        self.chunk_bytes = chunk_bytes
        self.sequence_group: SequenceGroup | None = vars(model).get("sequence_group")
        vars(model)["compiles_loss"] = False  # which a plan that compiles layers changes
        self.balance = _balance_of(model)
        self.balancing_loss: Tensor | None = None  # of the last forward
        both = (model, model.get_decoder())
        self.takes_attention = all(_takes_kwargs(module) for module in both)
        self.named, of_decoder = (frozenset(signature(module.forward).parameters) for module in both)
        self.unread = self.named - of_decoder  # such as images, which the model makes states of
        self.head = None if loss == "full" else find_head(model)
        if loss in ("chunked", "liger") and self.head is None:
            raise InputError(
                f"--loss {loss}: {type(model).__name__} does more to its logits than a linear layer, a scale and a "
                "soft cap; pass --loss full"
            )
        if loss == "liger" and self.head is not None:
            self.head = with_liger(self.head)
        if tokens is not None and self.head is not None:
            self.chunk_bytes = tokens * len(self.head.linear.weight) * torch.float32.itemsize

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        is_padded: bool | None = None,
        **further: Any,
    ) -> Tensor:
        """Compute the summed loss, a scalar in at least float32, of tensors (B, T).

        Labels are not shifted; -100 does not count. Position ids that start again keep documents apart, if there is no
        attention mask. ``is_padded`` is for ``padding_known``. Further arguments are inputs that the model names, such
        as images, or go to its attention. In training the balancing loss of a mixture's routers is added:
        NOTE [ balanced experts ].

        Raises:
            InputError: the model makes more or fewer states than there are labels.
        """
        inputs = {name: value for name, value in further.items() if self.takes_attention or name in self.named}
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)  # (B, T): the states stay whole
        if self.sequence_group is not None:
            taken, targets = self.sequence_group.sliced(input_ids, targets, position_ids, document_lengths)
            inputs |= taken
        else:
            given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
            inputs |= {name: value for name, value in given.items() if value is not None}
            if attends_by_document(self.model):
                if document_lengths is None:
                    raise ValueError("document_lengths are missing, by which this model keeps documents apart")
                inputs["document_lengths"] = Documents(document_lengths)
        targets = targets.flatten()
        compiles = targets.is_cuda and vars(self.model)["compiles_loss"]  # on a CPU it may take longer
        needs_chunks = self.head is not None and (compiles or pays(targets, self.head, self.chunk_bytes))
        if self.head is None or (self.loss == "auto" and not needs_chunks):
            with padding_known(is_padded):
                outputs = self.model(**inputs, use_cache=False)
            self._check_length(outputs.logits, targets)
            logits = outputs.logits.flatten(0, 1)  # (B * T, V)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            self.look(targets, lambda counts: logits[counts])
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="sum")
            return self._balanced(loss, outputs, targets)
        head, losses = self.head, []

        def loss_of(hidden: Tensor, tied: TiedGradient | None, run: Callable[..., Tensor]) -> Tensor:
            self._check_length(hidden, targets)
            self.look(targets, lambda counts: head.logits(hidden.flatten(0, 1)[counts]))
            settings = {"chunk_bytes": self.chunk_bytes, "tied": tied, "compiles": compiles}
            losses.append(run(hidden.flatten(0, 1), targets, **settings))
            return losses[0]

        with self._tied(head.linear) as tied, padding_known(is_padded):
            if (self.balance and self.training) or not self.unread.isdisjoint(inputs):
                # The model's forward, whose head gives the loss in place of logits
                with forward_of(head.linear, lambda hidden: loss_of(hidden, tied, head._loss)):
                    outputs = self.model(**inputs, use_cache=False)
                return self._balanced(losses[0], outputs, targets)
            hidden = self.model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # (B, T, D)
        return loss_of(hidden, tied, head.loss)

    def look(self, targets: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Look at the logits of ``targets``, (N,): ``logits_of`` gives those of a mask, bool (N,). Here nothing."""

    def _check_length(self, states: Tensor, targets: Tensor) -> None:
        found = states.shape[:-1].numel()
        if found != len(targets):
            raise InputError(
                f"{type(self.model).__name__} makes {found:,} states for {len(targets):,} labels, so it is not known "
                "which count: take another model"
            )

    @property
    def figures(self) -> dict[str, float]:
        """The balancing loss of the last forward, for a row of metrics; reading it waits for the device."""
        return {} if self.balancing_loss is None else {"train/aux_loss": self.balancing_loss.item()}

    def _balanced(self, loss: Tensor, outputs: Any, targets: Tensor) -> Tensor:
        """Add the balancing loss of ``outputs`` to a summed loss, in training: NOTE [ balanced experts ]."""
        balancing = getattr(outputs, "aux_loss", None)
        if not (self.balance and self.training and isinstance(balancing, Tensor)):
            return loss
        self.balancing_loss = balancing.detach()
        return loss + self.balance * balancing * (targets != IGNORED_LABEL).sum()

    @property
    def notice(self) -> str | None:
        """A line on what is added to the cross-entropy."""
        return f"the loss has {self.balance:g} times the balancing loss of the routers" if self.balance else None

    def _tied(self, head: nn.Linear) -> AbstractContextManager[TiedGradient | None]:
        embedding = self.model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and embedding.weight is head.weight:
            return tied_gradient(embedding)
        return nullcontext()


def read_loss(loss: LossKind) -> tuple[str, int | None]:
    """Return the name in a value of ``--loss``, and the tokens of a chunk where it has them.

    Raises:
        InputError: there is no such loss.
    """
    name, colon, tokens = loss.partition(":")
    is_number = tokens.isascii() and tokens.isdigit() and 0 < int(tokens) <= MAX_CHUNK_TOKENS
    if name not in LOSSES or (colon and (name != "chunked" or not is_number)):
        raise InputError(f"--loss {loss}: must be one of {', '.join(LOSSES)}, or chunked:TOKENS such as chunked:8192")
    return name, int(tokens) if colon else None


def _balance_of(model: PreTrainedModel) -> float:
    """Return the weight of the balancing loss that the configuration asks for, 0 for none: NOTE [ balanced experts ].

    Raises ``InputError`` where it asks for a z-loss, as Bamba's may, which has to have all logits.
    """
    config = model.config.get_text_config()
    if getattr(config, "z_loss_coefficient", 0):
        raise InputError(
            f"{type(model).__name__}: z_loss_coefficient {config.z_loss_coefficient} of its configuration is not "
            "followed: set it to 0 there, or by --config_overrides"
        )
    named = product((model, config), ("router_aux_loss_coef", "aux_loss_coef"))
    found = [getattr(owner, name) for owner, name in named if hasattr(owner, name)]
    return float(found[0]) if found and getattr(config, "output_router_logits", False) else 0.0


def _takes_kwargs(module: nn.Module) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature(module.forward).parameters.values())


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: ``softcap * tanh(scale * linear(hidden) / softcap)``."""

    linear: nn.Linear
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map (..., D) to (..., V)."""
        logits = F.linear(hidden, self.linear.weight, self.linear.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, hidden: Tensor, targets: Tensor, **settings: Any) -> Tensor:
        """Compute the summed loss of (N, D) hidden states against (N,) targets, without the (N, V) logits.

        The layer itself is called for it, so that its hooks run, which gather weights that are in shards. ``settings``
        are those of ``linear_cross_entropy``.
        """
        with forward_of(self.linear, lambda states: self._loss(states, targets, **settings)):
            loss: Tensor = self.linear(hidden)
        return loss

    def _loss(self, hidden: Tensor, targets: Tensor, **settings: Any) -> Tensor:
        return linear_cross_entropy(
            hidden,
            self.linear.weight,
            targets,
            bias=self.linear.bias,
            logit_scale=self.scale,
            softcap=self.softcap,
            **settings,
        )


def pays(targets: Tensor, head: Head, chunk_bytes: int | None = None) -> bool:
    """Tell whether the logits of ``targets`` are more than one chunk, or the head's words are padded."""
    weight = head.linear.weight
    several = num_chunks(targets.numel(), len(weight), chunk_bytes or default_chunk_bytes(targets.device)) > 1
    return several or pads_words(weight)


def with_liger(head: Head) -> Head:
    """Give ``head`` the fused loss of Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989).

    Raises ``InputError`` without a CUDA device or liger-kernel, and for logits that it cannot scale.
    """
    if not torch.cuda.is_available():
        raise InputError("--loss liger needs a CUDA device, and there is none: pass --loss chunked")
    if find_spec("liger_kernel") is None:
        raise InputError("--loss liger needs liger-kernel: pip install 'memsave-recipes[liger]'")
    if head.scale != 1:
        raise InputError(f"--loss liger cannot scale logits by {head.scale:g}, as this model does: pass --loss chunked")
    return LigerHead(head.linear, head.scale, head.softcap)


class LigerHead(Head):
    """The same logits with Liger Kernel's loss."""

    def _loss(self, hidden: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """Compute it as ``Head`` does; the kernels choose their own chunks, and give autograd their own gradients."""
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # optional, and needs CUDA

        fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum", softcap=self.softcap)
        loss: Tensor = fused(self.linear.weight, hidden, targets, self.linear.bias)
        return loss


@torch.no_grad()
def find_head(model: PreTrainedModel) -> Head | None:
    """Find the head that gives the model's own logits on a few tokens; ``None`` where there is none.

    A model of fake tensors has no logits to compare, and the first reading is believed.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or not _is_behind_the_decoder(linear, model):
        return None
    if isinstance(linear.weight, FakeTensor):
        return Head(linear, next(_scales(model)), next(_softcaps(model)))
    with evaluating(model):
        tokens = torch.arange(min(8, linear.out_features), device=linear.weight.device)[None]
        try:
            logits = model(tokens, use_cache=False).logits
        except TypeError:  # of a model that takes no text alone
            return None
        hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state
    if hidden.shape[-1] != linear.in_features:  # ELECTRA projects them first
        return None
    heads = (Head(linear, scale, softcap) for scale, softcap in product(_scales(model), _softcaps(model)))
    return next((head for head in heads if _same(head.logits(hidden), logits)), None)


def _is_behind_the_decoder(linear: nn.Linear, model: PreTrainedModel) -> bool:
    """Tell it of the head: Llama 4 calls itself its decoder, ModernBERT a part of its head."""
    inside = list(model.get_decoder().modules())
    return linear not in inside and model.get_input_embeddings() in inside


def _same(logits: Tensor, expected: Tensor) -> bool:
    precision = torch.finfo(logits.dtype).eps
    largest = expected.abs().max().item()
    return bool((logits.to(expected.dtype) - expected).abs().max().item() <= 8 * precision * max(largest, precision))


def _scales(model: PreTrainedModel) -> Iterator[float]:
    """Cohere, Granite, HyperCLOVA and Falcon-H1 scale their logits, each under a name and in a direction of its own."""
    for value in _entries(model, "logit_scale", "logits_scaling", "lm_head_multiplier"):
        yield value
        yield 1 / value
    yield 1.0


def _softcaps(model: PreTrainedModel) -> Iterator[float | None]:
    """Gemma 2 and its kin; RecurrentGemma."""
    yield from _entries(model, "final_logit_softcapping", "logits_soft_cap")
    yield None


def _entries(model: PreTrainedModel, *names: str) -> Iterator[float]:
    """Those of the configuration that are set; of a model that takes images, of its text's."""
    for name in names:
        if value := getattr(model.config, name, None) or getattr(model.config.get_text_config(), name, None):
            yield float(value)


def check_causal(model: PreTrainedModel, name: str) -> None:
    """Raise ``InputError`` where logits depend on the very tokens that they are to predict."""
    if not _sees_later_tokens(model):
        return
    cure = "take another model"
    if model.config.to_dict().get("is_decoder") is False:
        cure = "pass --config_overrides is_decoder=True, or set it in the config.json of a pretrained model"
    raise InputError(f"{name} sees the tokens that it is to predict, as an encoder does: {cure}")


def _sees_later_tokens(model: PreTrainedModel) -> bool:
    """Tell by the gradient of the first half's logits: masked tokens have none at all, in any precision."""
    embedding = model.get_input_embeddings()
    weight = next(embedding.parameters())
    tokens = len(weight) // 2 + torch.arange(8, device=weight.device)[None] % 4  # few of the special ones are there
    embedded: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()

    with evaluating(model), embedding.register_forward_hook(note), torch.enable_grad():
        logits = model(tokens, use_cache=False).logits
        gradients = torch.autograd.grad(logits[:, :4].float().square().sum(), embedded)
    return any(bool(gradient.flatten(0, -2)[-4:].any()) for gradient in gradients)  # XLNet embeds (T, B)


@torch.no_grad()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Mapping[str, Any],
    num_tokens: int = 60,
) -> str:
    """Return ``prompt``, a text or messages with tools, as the model continues it at temperature 0.8; or why not."""
    num_positions = getattr(model.config, "max_position_embeddings", None) or 0
    num_tokens = min(num_tokens, num_positions // 2) if num_positions > 0 else num_tokens
    if isinstance(prompt, str):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids[:, -num_tokens:].to(model.device)
    else:
        options = {"tools": prompt["tools"], "add_generation_prompt": True, "tokenize": False}
        written = tokenizer.apply_chat_template(prompt["messages"], **options)
        tokens = tokenizer(written, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        tokens = tokens[:, -max(num_positions - num_tokens, 0) :]
    if attends_by_document(model):
        model.set_attn_implementation("sdpa")  # which knows the cache
    torch.manual_seed(0)
    model.eval()
    try:
        continued = model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=tokenizer.eos_token_id,
        )
    except Exception as error:  # transformers' own loop does not run every model that trains
        return printable_lines(
            f"none, because generate() fails on {type(model).__name__}: {' '.join(str(error).split())}"
        )
    if isinstance(prompt, str):
        return printable_lines(str(tokenizer.decode(continued[0])))
    reply = tokenizer.decode(continued[0, tokens.shape[1] :], skip_special_tokens=True)
    return printable_lines(f"{prompt['messages'][-1]['content']}\nreply: {reply}")
