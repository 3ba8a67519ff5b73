"""Tiny trainings with the real trainers, and the peaks of their steps."""

from contextlib import ExitStack

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.plans import Action

OLDER = not hasattr(TrainingArguments, "activation_checkpointing")  # transformers 5.17
CHECKPOINTING = "gradient_checkpointing" if OLDER else "activation_checkpointing"
plans_while_recorded = pytest.mark.skipif(OLDER, reason="the torch beside it, 2.11, nests no profilers")
WORDS = [f"word{number}" for number in range(120)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "user:", "assistant:"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BASE = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}


def llama(layers=4, dropout=0.1):
    """In training it draws random numbers: the dropout of its attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def saves_memory(plan):
    """Which action costs the least time, and so which one a budget takes, is not the same in all runs."""
    return len(plan.blocks_under(Action.KEEP)) < len(plan.blocks)


def tokenizer():
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def words(count, first=0):
    return " ".join(WORDS[(first + number) % len(WORDS)] for number in range(count))


def rows(lengths):
    """Token rows of these lengths, as a data set."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(6, 126, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def padded(samples):
    """A collator: rows padded to the longest."""
    length = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (length - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids != 0).long()}


def chats(number=16, length=24):
    return Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": "user", "content": words(length, first=index)},
                    {"role": "assistant", "content": words(length + index % 5, first=3 * index)},
                ]
                for index in range(number)
            ]
        }
    )


IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %} </s> {% endfor %}"
)


def image_processor():
    """Of a LLaVA: images of 48 pixels a side in 9 patches."""
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"height": 48, "width": 48}, do_center_crop=False),
        tokenizer=words,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_TEMPLATE,
    )


def llava(frozen=False):
    """A tower of four layers, of which the one before the last is read, and ``llama``'s decoder."""
    torch.manual_seed(0)
    tower = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=48, patch_size=16
    )
    config = LlavaConfig(vision_config=tower, text_config=llama().config, image_token_id=len(SPECIAL) + len(WORDS))
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(not frozen)
    return model


def chats_with_images():
    shades = [Image.new("RGB", (40 + shade, 60), (shade, 3 * shade, 255 - shade)) for shade in range(16)]
    return Dataset.from_dict({**chats().to_dict(), "images": [[shade] for shade in shades]})


def preferences(number=16, length=24):
    return Dataset.from_dict(
        {
            "prompt": [words(8, first=index) for index in range(number)],
            "chosen": [words(length, first=2 * index) for index in range(number)],
            "rejected": [words(length, first=5 * index) for index in range(number)],
        }
    )


class LaterPeaks(TrainerCallback):
    """The bytes at the peak of every step from the third on; the callback under test measures the second."""

    def __init__(self):
        self.peaks = []
        self._window = ExitStack()

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step >= 2:
            inner = getattr(optimizer, "optimizer", optimizer)
            self.peak = self._window.enter_context(break_down_peak(model, inner, torch.device("cpu")))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 2:
            self._window.close()
            self.peaks.append(self.peak.breakdown.total_bytes)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def differing(one, other):
    """The names of the weights that are not bit for bit the same."""
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def own_forwards(model):
    """The names of the modules whose instance has a forward of its own; TRL gives one to the model itself."""
    return {name for name, module in model.named_modules() if "forward" in vars(module)}
