"""The causal language model of a recipe: its flags, how it is built, and how it attends to packed rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl
from transformers import AutoModelForCausalLM, PreTrainedModel

from memsave_recipes.core.losses import WORDS, default_chunk_bytes
from memsave_recipes.core.step.settings import REGIONS
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind, read_loss
from memsave_recipes.models.flags import RULES, Rules
from memsave_recipes.models.packed_attention import PackedAttention, drops, set_packed_attention
from memsave_recipes.models.pretrained import TransformerArguments, build_transformer, configuration_of
from memsave_recipes.models.sequence_parallel import SequenceGroup

CHUNKS = ("chunked:8192", "chunked:1024")  # of tokens; beside full, which pads no odd vocabulary


@dataclass(kw_only=True)
class LanguageModelArguments(TransformerArguments):
    """The causal language model and its loss."""

    loss: LossKind = field(
        default="auto",
        metadata={
            "help": "full; chunked, which never holds all logits, chunked:TOKENS, liger; auto: chunks if they pay"
        },
    )
    dropout: float | None = 0.0  # the same loss in every layout
    packed_attention: PackedAttention = field(  # document (each by itself) if it is equal, else mask
        default="auto", metadata={RULES: Rules(resume="chosen", before="mask")}
    )

    def check_transformer(self) -> None:
        """Check the loss, too."""
        super().check_transformer()
        read_loss(self.loss)

    @property
    def one_row(self) -> bool:
        """Flash attention keeps documents apart only if a micro-batch is one long row."""
        return "flash" in (self.attn_implementation or "")

    @property
    def max_positions(self) -> int | None:
        """Of the model; ``None`` where it has no limit."""
        return getattr(configuration_of(self), "max_position_embeddings", None)

    def losses(self, vocab_size: int) -> dict[str, tuple[str, ...]]:
        """Return the ways to compute the loss that a plan compares, as ``Task`` has them."""
        words = vocab_size if self.model_type else configuration_of(self).get_text_config().vocab_size
        return {
            "losses": ("full", "chunked") if self.loss == "auto" else (self.loss,),
            "losses_on_accelerators": CHUNKS if words % WORDS else ("full", *CHUNKS),
        }


def build_language_model(args: Any, *, with_weights: bool, **options: Any) -> PreTrainedModel:
    """Build the model that the flags name; without weights it attends as it is to be planned."""
    options |= {"dtype": args.torch_dtype, "in_4bit": args.load_in_4bit}
    model = build_transformer(AutoModelForCausalLM, args, with_weights=with_weights, **options)
    if not with_weights:
        attend(model, args, SequenceGroup.estimated(args.sequence_parallel))
    return model


def settle_language_model(
    model: PreTrainedModel, args: Any, *, timeout: timedelta, end_of_turn: int | None
) -> Sequence[str | None]:
    """Set the attention of a model on its device, and let it stop where turns end.

    Args:
        timeout: of the groups of ranks that share rows.
        end_of_turn: a token; ``None`` without conversations.

    Returns:
        Lines on the attention.
    """
    stop_at(model, end_of_turn)
    line = attend(model, args, SequenceGroup.of(args.sequence_parallel, timeout))
    return line, take_flash_attention_3(model) if args.fused_ops == "auto" else None


def with_loss(model: PreTrainedModel, loss: str | None, device: torch.device, *, flag: LossKind) -> CausalLMLoss:
    """Return the model with its loss, as it is trained on ``device``; by default that of the ``flag``."""
    return CausalLMLoss(model, loss or flag, default_chunk_bytes(device))


def attend(model: PreTrainedModel, args: Any, group: SequenceGroup | None = None) -> str | None:
    """Set the attention of packed rows, or of those that the ranks of ``group`` share; return a line on it."""
    if group is not None:
        group.adopt(model, compiles=_compiles(model, args))
        return group.line
    if not args.packing or args.one_row:
        return None
    return set_packed_attention(model, args.packed_attention, compiles=_compiles(model, args))[1]


def take_flash_attention_3(model: PreTrainedModel) -> str | None:
    """Let FlashAttention-3 be the flash attention of torch in this process, if ``model`` may; return a line on it.

    It may on a GPU of the Hopper family, where the package is installed, without dropout, which these kernels lack.
    Shah et al. 2024, https://arxiv.org/abs/2407.08608, by ``torch.nn.attention.activate_flash_attention_impl``.
    """
    device = next(model.parameters()).device
    is_hopper = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9
    if not is_hopper or find_spec("flash_attn_interface") is None or drops(model):
        return None
    with warnings.catch_warnings():  # that it takes the place of another
        warnings.simplefilter("ignore")
        activate_flash_attention_impl("FA3")
    return "flash attention: FlashAttention-3; --fused_ops none leaves torch's own"


def _compiles(model: PreTrainedModel, args: Any) -> bool:
    """Tell whether layers compile by the flags, or by the plan that they name."""
    if args.compile == REGIONS or args.solves:
        return bool(args.compile == REGIONS)
    return bool(args.named_plan(model).compiles)


def stop_at(model: PreTrainedModel, token: int | None) -> None:
    """Let ``generate``, also of the saved model, stop at ``token``, where the assistant's turns end."""
    if token is None or model.generation_config is None:
        return
    stops = model.generation_config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    model.generation_config.eos_token_id = list(dict.fromkeys([token, *stops]))
