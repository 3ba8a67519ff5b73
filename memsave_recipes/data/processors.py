"""Processors of images and text: what they make of rows, which tokens count there, and one for a LLaVA from scratch."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from io import BytesIO
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from transformers import CLIPImageProcessorPil, LlavaProcessor
from transformers.utils.chat_template_utils import render_jinja_template

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.image_rows import MARK, WRITTEN
from memsave_recipes.data.text.chat_template import (
    CHATML,
    CHATML_END,
    CHATML_START,
    CHATML_TOKENS,
    GENERATION,
    OWN_TEMPLATE,
    ChatTemplate,
    in_spans,
    set_chat_template,
)
from memsave_recipes.data.text.conversations import (
    ROLES,
    Conversation,
    Message,
)
from memsave_recipes.data.text.tokenizers import load_tokenizer
from memsave_recipes.data.vision.decoding import GREY, defect_of_header
from memsave_recipes.models.image_text import limit_pixels, open_processor
from memsave_recipes.models.pretrained import configuration_of

PIXELS = "pixel_values"


def encoded(processor: Any, texts: list[str], images: list[list[Image.Image]], **options: Any) -> Any:
    """Return what the processor makes of rows at once: texts as the template writes them, and the images of each."""
    given: dict[str, Any] = {"images": images} if any(images) else {}
    return processor(text=list(texts), **given, **_special(processor, texts[0]), **options)


def with_replacements(text: str, replaced: Sequence[dict[str, Any]]) -> str:
    """Return a text with what the processor puts in place of its images."""
    for one in reversed(replaced):
        start, stop = one["span"]
        text = text[:start] + one["replacement"] + text[stop:]
    return text


class _Template:
    """The template of a processor as ``ChatTemplate`` uses a tokenizer's: for messages with ``MARK`` in their texts."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.added_tokens_decoder = processor.tokenizer.added_tokens_decoder

    def get_chat_template(self) -> str:
        return str(self.processor.chat_template)

    def apply_chat_template(self, messages: list[Message], **options: Any) -> Any:
        return self.processor.apply_chat_template(list(map(_with_parts, messages)), **options)

    def marked_spans(self, messages: list[Message], **options: Any) -> list[tuple[int, int]]:
        """Return the places in the text that ``{% generation %}`` stands around."""
        spans: Any = render_jinja_template(
            conversations=[list(map(_with_parts, messages))],
            chat_template=self.get_chat_template(),
            return_assistant_tokens_mask=True,
            **{**self.processor.tokenizer.special_tokens_map, **options},
        )
        return [(int(start), int(stop)) for start, stop in spans[1][0]]


def _with_parts(message: Message) -> Message:
    texts = message["content"].split(MARK)
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def measured_row(
    conversation: str, place: str, images: list[dict[str, Any]], processor: Any, most_images: int
) -> dict[str, Any]:
    """Return a conversation as the template writes it, what counts in it, and its size in tokens and pixel values.

    Raises:
        InputError: it has too many images, or the template does not write one mark for each.
    """
    if len(images) > most_images:
        raise InputError(f"{place} has {len(images)} images, more than --images_per_row {most_images}: raise it")
    chat: Conversation = json.loads(conversation)
    template = ChatTemplate(_Template(processor), place, chat["tools"], chat.get("options", {}))  # type: ignore[arg-type]
    messages, uncounted = template.written(chat["messages"]), chat.get("uncounted", [])
    text, turns = _turns(template, messages)
    spans = [(start, stop) for turn, start, stop in turns if turn not in uncounted]
    token = processor.image_token
    if text.count(token) != len(images):
        raise InputError(
            f"{place}: the chat template writes {text.count(token)} {token} for {len(images)} images: take a text that "
            "spells it out of the row, or pass another --chat_template"
        )
    made = [made_of(processor, _size_of(image, place)) for image in images]
    (written,), replaced = processor.get_text_with_replacements([text], [replacement for replacement, _ in made])
    tokens = processor.tokenizer(written, return_offsets_mapping=True, verbose=False, **_special(processor, text))
    return {
        "text": text,
        "spans": spans,
        "length": len(tokens["input_ids"]),
        "area": sum(area for _, area in made),
        "num_counted": int(counted_tokens(tokens["offset_mapping"], written, [*replaced, []][0], spans).sum()),
    }


def _turns(template: ChatTemplate, messages: list[Message]) -> tuple[str, list[tuple[int, int, int]]]:
    """Return the text of a conversation, and of each turn of the assistant its number and where it is in the text."""
    text = template.render(messages)
    template.check_reasoning(messages, text)
    own: Any = template.tokenizer
    if not GENERATION.search(own.get_chat_template()):
        return text, list(template.assistant_spans(messages, text))
    spans = own.marked_spans(messages, tools=template.tools, **template.options)
    assistants = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) != len(assistants):
        raise InputError(
            f"{template.place}: the chat template marks {len(spans)} turns of the assistant, and there are "
            f"{len(assistants)}: {OWN_TEMPLATE}"
        )
    return text, [(at, *span) for at, span in zip(assistants, spans, strict=True)]


def _special(processor: Any, text: str) -> dict[str, bool]:
    """Say whether special tokens are added, as ``apply_chat_template`` of processors does: not behind the first one."""
    first = processor.tokenizer.bos_token
    return {"add_special_tokens": first is None or not text.startswith(first)}


def counted_tokens(
    offsets: Any, written: str, replaced: Sequence[dict[str, Any]], spans: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return which tokens of a text are in ``spans`` of what it was before images were ``replaced``, bool (T,)."""
    ends = [0, *(one["span"][1] for one in replaced)]
    gained = [0, *(one["new_span"][1] - one["span"][1] for one in replaced)]
    moved = ((0, *(place + gained[bisect_right(ends, place) - 1] for place in span)) for span in spans)
    is_counted: np.ndarray = in_spans(offsets, written, moved) >= 0
    return is_counted


@cache
def made_of(processor: Any, size: tuple[int, int]) -> tuple[str, int]:
    """Return the text that ``processor`` puts in place of an image of (width, height), and how many pixel values."""
    made = processor(
        text=[processor.image_token], images=[[Image.new("RGB", size)]], return_text_replacement_offsets=True
    )
    replaced = made.get("text_replacement_offsets") or [[]]
    if len(replaced[0]) != 1:
        raise InputError(
            f"{type(processor).__name__} does not say what it puts in place of images, so it is not known which tokens "
            "count: take another model"
        )
    return str(replaced[0][0]["replacement"]), sum(prod(np.shape(one)) for one in made[PIXELS])


def _size_of(stored: dict[str, Any], place: str) -> tuple[int, int]:
    """Read the width and height, upright, from the header."""
    defect = defect_of_header(stored)
    if defect not in ("", GREY):
        name = stored["path"] or "its image"
        raise InputError(f"{place}: {name} cannot be read ({defect}): replace it, or remove the row")
    with Image.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"])) as image:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return image.size[::-1] if is_turned else image.size


def end_of_turn_of(processor: Any) -> int | None:
    """Return the special token with which the assistant ends a turn; ``None`` where the template writes none."""
    asked = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    text, turns = _turns(ChatTemplate(_Template(processor), "a conversation"), asked)  # type: ignore[arg-type]
    tokens = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = in_spans(tokens["offset_mapping"], text, iter(turns)) >= 0
    written = (int(token) for token in reversed(np.array(tokens["input_ids"])[counts]))
    last = next((token for token in written if str(processor.tokenizer.decode([token])).strip()), None)
    return last if last in processor.tokenizer.added_tokens_decoder else None


def render_question(processor: Any, question: str, num_images: int) -> str:
    """Return the text that the reply to a question with images follows; raise ``InputError`` where it is refused."""
    template = ChatTemplate(_Template(processor), "the question", way_out="change it")  # type: ignore[arg-type]
    return template.render([{"role": "user", "content": MARK * num_images + question}], add_generation_prompt=True)


TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ END + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, of messages in parts."""


def open_or_make_processor(args: Any, texts: Iterable[str]) -> Any:
    """Open the processor that the flags name, or make that of a LLaVA from scratch; with ``--max_pixels``.

    Raises:
        InputError: as ``open_processor`` and ``limit_pixels``; another type from scratch has no processor.
    """
    flag = "--processor_name" if args.processor_name else "--model_name_or_path"
    name = args.processor_name or args.tokenizer_name_or_path
    if name is not None:
        processor = open_processor(name, flag=flag, trust_remote_code=args.trust_remote_code)
    elif args.model_type == "llava":
        processor = _make_llava_processor(texts, configuration_of(args), args.vocab_size)
    else:
        raise InputError(
            f"--model_type {args.model_type} has no processor, and one is made for llava alone: give --processor_name"
        )
    limit_pixels(processor, args.max_pixels)
    return processor


def _make_llava_processor(texts: Iterable[str], config: Any, vocab_size: int) -> Any:
    """Make a tokenizer that is trained on ``texts``, and an image processor that makes all images of one size."""
    tokenizer = load_tokenizer(None, chain(texts, ROLES), vocab_size=vocab_size - len(CHATML_TOKENS) - 1)
    tokenizer.add_special_tokens({"eos_token": CHATML_END, "extra_special_tokens": [CHATML_START, WRITTEN]})
    side = config.vision_config.image_size
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=WRITTEN,
    )
    set_template(processor, CHATML)
    return processor


def set_template(processor: Any, chat_template: str | None) -> None:
    """Give ``processor`` the template that ``--chat_template`` names, or else its own or its tokenizer's.

    Raises:
        InputError: there is none, no readable file, or no token for an image.
    """
    if getattr(processor, "image_token", None) is None:
        raise InputError(f"{type(processor).__name__} has no token for an image: take another model")
    tokenizer = processor.tokenizer
    own = processor.chat_template or tokenizer.chat_template
    processor.chat_template = tokenizer.chat_template = own.get("default") if isinstance(own, dict) else own
    if chat_template is not None or not processor.chat_template:
        set_chat_template(tokenizer, chat_template, is_new=False)
        processor.chat_template = tokenizer.chat_template
    if chat_template == CHATML:
        end = repr(CHATML_END) if CHATML_END in tokenizer.get_vocab() else "eos_token"
        processor.chat_template = TEMPLATE.replace("END", end).replace("IMAGE", repr(processor.image_token))
    tokenizer.chat_template = None  # else both are saved, in one file
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
