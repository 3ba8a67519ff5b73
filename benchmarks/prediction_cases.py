"""Random cases for ``prediction.py``: a small model, a micro-batch, an optimizer, a precision and a plan.

Case ``number`` of a seed is always the same. Models are small, so that a thousand cases take an hour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models import IMAGES, TEXT

LABELS = "text_classification"
LONGEST_SPANS = (1, 2, 4, 64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is predicted and then run.

    Args:
        model: its kind, a key of ``KINDS``.
        recipe, flags: of the recipe that builds it.
        strategy: of the plan; ``random`` spans, or ``budget`` for a random budget.
        accumulation_steps: micro-batches of a step.
        draw: the number that random spans and budgets follow from.
        compiled: whether layers compute compiled.
    """

    model: str
    recipe: str
    flags: str
    optimizer: str
    precision: str
    strategy: str
    micro_batch_size: int
    accumulation_steps: int = 1
    draw: int = 0
    compiled: bool = False


def random_case(seed: int, number: int) -> Case:
    """The case with this number."""
    rng = Random(f"{seed} {number}")
    model = rng.choice(list(KINDS))
    recipe, flags, most_samples = KINDS[model](rng)
    parts = rng.randint(2, 3)
    strategies = ("none", "full", f"every:{parts}", f"segments:{parts}", "selective", "budget", "budget", "random")
    return Case(
        model=model,
        recipe=recipe,
        flags=flags,
        optimizer=rng.choice(list(OPTIMIZERS)),
        precision=rng.choice(("no", "bf16")),
        strategy=rng.choice(strategies),
        micro_batch_size=rng.randint(2, most_samples),
        accumulation_steps=rng.choice((1, 1, 1, 2)),
        draw=rng.randrange(2**31),
    )


OPTIMIZERS = {
    "momentum": "--optimizer sgd",
    "adamw": "--optimizer adamw",
    "adamw_8bit": "--optimizer adamw_8bit",
    "adafactor": "--optimizer adafactor",
}

Drawn = tuple[str, str, int]
"""A recipe, its flags, and the most samples of a micro-batch."""


def _convolutions(*names: str, sizes: tuple[int, ...] = (48, 64, 96)) -> Callable[[Random], Drawn]:
    def draw(rng: Random) -> Drawn:
        return IMAGES, f"--model {rng.choice(names)} --image_size {rng.choice(sizes)} --augmentation none", 6

    return draw


def _images(model_type: str, shapes: Callable[[Random], dict[str, object]]) -> Callable[[Random], Drawn]:
    def draw(rng: Random) -> Drawn:
        flags = f"--model_type {model_type} --image_size {rng.choice((64, 96))} --augmentation none"
        return IMAGES, f"{flags} --config_overrides {_overrides(shapes(rng))}", 6

    return draw


WORDS: dict[str, object] = {"vocab_size": 512}


def _causal(model_type: str, names: tuple[str, str, str, str | None], **others: object) -> Callable[[Random], Drawn]:
    """``names`` are the configuration's for width, layers, heads and the width inside a layer."""

    def draw(rng: Random) -> Drawn:
        flags = f"--model_type {model_type} --block_size {rng.choice((64, 96, 128, 200))}"
        loss = rng.choice(("full", "chunked"))
        return TEXT, f"{flags} --loss {loss} --config_overrides {_overrides(_layers(rng, names) | WORDS | others)}", 4

    return draw


def _classifier(
    model_type: str, names: tuple[str, str, str, str | None], **others: object
) -> Callable[[Random], Drawn]:
    """As ``_causal``."""

    def draw(rng: Random) -> Drawn:
        flags = f"--model_type {model_type} --max_length {rng.choice((32, 64, 128))}"
        return LABELS, f"{flags} --config_overrides {_overrides(_layers(rng, names) | WORDS | others)}", 8

    return draw


def _layers(rng: Random, names: tuple[str, str, str, str | None]) -> dict[str, object]:
    width_name, layers, heads, inside = names
    width = rng.choice((64, 96, 128))
    found: dict[str, object] = {width_name: width, layers: rng.randint(3, 5), heads: rng.choice((2, 4))}
    return found | ({inside: rng.choice((2, 4)) * width} if inside else {})


def _overrides(values: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _vit(rng: Random) -> dict[str, object]:
    shape = _layers(rng, ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"))
    return shape | {"patch_size": rng.choice((8, 16))}


_USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_GPT2 = ("n_embd", "n_layer", "n_head", None)

KINDS: dict[str, Callable[[Random], Drawn]] = {
    "VGG": _convolutions("vgg_small"),
    "DenseNet": _convolutions(*["densenet_small"] * 4, "densenet121"),
    "ResNet-50": lambda rng: (
        IMAGES,
        f"--model_type resnet --image_size {rng.choice((64, 96))} --augmentation none",
        4,
    ),
    "ConvNeXt": lambda rng: (
        IMAGES,
        f"--model_type convnext --image_size {rng.choice((64, 96))} --augmentation none",
        4,
    ),
    "ViT": _images("vit", _vit),
    "DeiT": _images("deit", _vit),
    "GPT-2": _causal("gpt2", _GPT2),
    "Llama": _causal("llama", _USUAL, num_key_value_heads=2),
    "Qwen3": _causal("qwen3", _USUAL, num_key_value_heads=2, head_dim=32),
    "OPT": _causal("opt", ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")),
    "GPT-NeoX": _causal("gpt_neox", _USUAL),
    "BERT": _classifier("bert", _USUAL),
    "RoBERTa": _classifier("roberta", _USUAL),
    "DistilBERT": _classifier("distilbert", ("dim", "n_layers", "n_heads", "hidden_dim")),
    "ModernBERT": _classifier("modernbert", _USUAL),
}
