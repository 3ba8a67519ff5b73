"""Processors of known models of images and text, without the Hub: as many tokens of an image as the real ones make.

Their tokenizers know bytes and the tokens that stand for images alone. Sizes are those that public code states.
"""

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memsave_recipes.data.processors import set_template
from memsave_recipes.data.text.chat_template import CHATML_END, CHATML_START

OF_QWEN = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    **{"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
}
OF_GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
OF_SMOLVLM = {
    **{"image_token": "<image>", "video_token": "<video>", "fake": "<fake_token_around_image>"},
    **{"global": "<global-img>", "end": "<end_of_utterance>"},
    **{f"tile_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)},
}


def qwen3_vl() -> Any:
    """An image is cut into patches of 16 pixels, four of which are a token. Needs torchvision."""
    tokenizer = _tokenizer(OF_QWEN)
    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 2**16, "longest_edge": 2**24}, patch_size=16)
    return _made(transformers.Qwen3VLProcessor(images, tokenizer, transformers.Qwen3VLVideoProcessor()))


def smolvlm() -> Any:
    """An image is up to 17 tiles of 384 pixels, of 81 tokens each. Needs torchvision and num2words."""
    tile = {"longest_edge": 384}
    images = transformers.SmolVLMImageProcessor(size={"longest_edge": 4 * 384}, max_image_size=tile)
    videos = transformers.SmolVLMVideoProcessor(size=tile)
    return _made(transformers.SmolVLMProcessor(images, _tokenizer(OF_SMOLVLM), videos, image_seq_len=81))


def gemma3() -> Any:
    """An image is 896 pixels wide and high, and 256 tokens."""
    images = transformers.Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    return _made(transformers.Gemma3Processor(images, _tokenizer(OF_GEMMA), image_seq_length=256))


def ids_of(processor: Any, config: dict[str, Any]) -> dict[str, int]:
    """The entries of a configuration that name tokens, for the tokenizer of ``processor``."""
    tokenizer = processor.tokenizer
    names = {**OF_QWEN, **OF_GEMMA, **OF_SMOLVLM}
    entries = {f"{name}_{end}": name for name in names for end in ("id", "index")}
    known = set(transformers.CONFIG_MAPPING[config["model_type"]]().to_dict())
    return {
        entry: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name))
        for entry, name in entries.items()
        if entry in known and hasattr(tokenizer, name)
    }


def _tokenizer(tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    special = {**tokens, "start": CHATML_START}
    return PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, pad_token="<pad>", eos_token=CHATML_END, extra_special_tokens=special
    )


def _made(processor: Any) -> Any:
    set_template(processor, "chatml")
    return processor
