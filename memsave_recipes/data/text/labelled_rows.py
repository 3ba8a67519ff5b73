"""The rows of a text classifier by the flags: labelled texts, tokenizer and length."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from memsave_recipes.data.text.labelled_text import LabelledText, LabelledTextArguments, load_labelled_text
from memsave_recipes.data.text.tokenizers import (
    TokenizedSplits,
    check_inputs,
    check_length,
    check_vocabulary,
    load_text_tokenizer,
    tokenize,
)
from memsave_recipes.models.flags import check_ranges, option
from memsave_recipes.models.pretrained import configuration_of


@dataclass(kw_only=True)
class LabelledRowArguments(LabelledTextArguments):
    """The labelled texts, their tokenizer and length."""

    tokenizer_name: str | None = option(None, "folder or Hub id; default: the model's own", resume="place")
    max_length: int = option(128, "tokens after which a text or pair is cut off", least=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)


def load_labelled_rows(args: Any) -> tuple[LabelledText, TokenizedSplits]:
    """Load the texts that the flags of a recipe name, and the tokenizer, and tokenize them.

    Raises:
        InputError: as ``load_labelled_text``, ``load_text_tokenizer`` and ``tokenize``; or the model takes fewer
            tokens than ``--max_length``.
    """
    config = configuration_of(args)
    check_length(args.max_length, config)
    known = {"model_labels": args.model_labels, "model_problem": args.model_problem} if args.eval_only else {}
    texts = load_labelled_text(args, seed=args.seed, **known)
    tokenizer = load_text_tokenizer(
        args.tokenizer_name or args.tokenizer_name_or_path,
        texts,
        flag="--tokenizer_name" if args.tokenizer_name else "--model_name_or_path",
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        splits_special_tokens=config.is_encoder_decoder,
        trust_remote_code=args.trust_remote_code,
    )
    return texts, tokenize(texts, tokenizer, max_length=args.max_length)


def check_model(model: PreTrainedModel, max_length: int, tokens: TokenizedSplits) -> None:
    """Raise ``InputError`` for texts and tokens that ``model`` cannot take."""
    tokenizer = tokens.train.tokenizer
    check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
    check_inputs(model, tokens.train, tokens.validation)
    check_length(max_length, model.config, model, tokenizer)
