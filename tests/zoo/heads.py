"""New heads and adapters: what was trained comes back from its files, to the last bit.

    PYTHONPATH=tests python -m zoo.heads [--processes 2] [FAMILY | FAMILY:TYPE ...]

A base without a head is saved, loaded as a classifier, and all that trains is changed a little: of texts the adapters
of ``--lora`` and what is new, of images everything. Its logits are those of the files that it saves, loaded under
another seed: by the recipes and by peft alone, of images by transformers alone. A model of images and text gets back
the adapters of its decoder. With ``--flags lora`` images train adapters, too; with ``--flags freeze_backbone`` both
families of classifiers train the head alone, and transformers opens the files. Rows are added to
``docs/results/zoo_heads.jsonl`` as they come, and are not found again while they are there. The exit code is 1 where
something is lost.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm
from transformers import AutoModel
from zoo.architectures import Architecture
from zoo.batches import CLASSIFICATION, IMAGES, batch_of
from zoo.families import families
from zoo.image_text import IMAGE_TEXT, Flags
from zoo.matrix import import_in_advance, is_named, rows_of, shortened
from zoo.steps import IDENTICAL
from zoo.tiny import tiny_config

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.adapters import load_adapters
from memsave_recipes.models.image_classifiers import train_part_of_images
from memsave_recipes.models.image_text import train_part_of_image_text
from memsave_recipes.models.what_trains import ClassifierTrainingArguments, train_part

ROWS = Path("docs/results/zoo_heads.jsonl")
CLASSIFIER = "SEQ_CLS"
LORA = ClassifierTrainingArguments(lora=True, lora_rank=2)
FREEZE = ClassifierTrainingArguments(freeze_backbone=True)
LOST = ("wrong", "crash")
NOT_BUILT = {
    "dinat": "it needs natten",
    "layoutlmv2": "it needs detectron2",
    "pp_lcnet": "transformers has no model of it without the head",
    "shieldgemma2": "it takes a text beside the image, and has no head of its own",
    "timm_wrapper": "it needs timm and a name of it",
}
ROUNDING = 1e-7
"""On some processors sums of some models round otherwise from one copy of the model to the next."""


def base_without_head(kind: str, folder: Path, auto_class: str = CLASSIFICATION) -> None:
    """Save a tiny model of a type without what its classifier adds."""
    whole = getattr(transformers, auto_class).from_config(tiny_config(kind))
    bare = getattr(whole, whole.base_model_prefix, None)
    (AutoModel.from_config(tiny_config(kind)) if bare is None else bare).save_pretrained(folder)


def load(folder: Path, seed: int, num_labels: int = 3, auto_class: str = CLASSIFICATION) -> nn.Module:
    """The classifier of a folder; what its files lack is drawn from ``seed``."""
    torch.manual_seed(seed)
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True}
    model = getattr(transformers, auto_class).from_pretrained(folder, **options)
    config = model.config.get_text_config()
    if auto_class == CLASSIFICATION and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return model


def changed(model: Any) -> Any:
    """``model`` with every weight that trains a little changed."""
    random = torch.Generator().manual_seed(3)
    for parameter in model.train().parameters():  # LeViT forgets here what it remembers of its weights in evaluation
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=random)
    for norm in (one for one in model.modules() if isinstance(one, _BatchNorm) and one.training):
        norm.running_mean += 0.02  # as training moves it
    return model


@torch.no_grad()
def logits(model: nn.Module, kind: str, auto_class: str = CLASSIFICATION) -> Tensor:
    """(B, classes), in evaluation."""
    batch = batch_of(auto_class, kind)
    return model.eval()(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def row_of(model: Architecture, flags: str | None = None) -> str:
    """``identical``, ``within ROUNDING``, ``refused: ...``, ``wrong: ...``, or why the type is not built.

    Args:
        flags: ``lora`` or ``freeze_backbone``; by default what the row of its family in the page is about.
    """
    if model.auto_class == IMAGE_TEXT:
        return _row_of_image_text(model)
    of_text = model.auto_class == CLASSIFICATION
    asked = {"lora": LORA, "freeze_backbone": FREEZE, None: LORA if of_text else ClassifierTrainingArguments()}[flags]
    kind, auto_class = model.model_type, model.auto_class
    with TemporaryDirectory() as folder:
        base, final = Path(folder, "base"), Path(folder, "final")
        try:
            base_without_head(kind, base, auto_class)
            new = load(base, 1, auto_class=auto_class)
            logits(new, kind, auto_class)
        except Exception as error:
            return shortened(f"not built: {NOT_BUILT.get(kind) or f'{type(error).__name__}: {error}'}")
        try:
            size = batch_of(auto_class, kind).get("pixel_values", torch.empty(0)).shape[-1]
            train = (
                partial(train_part, task_type=CLASSIFIER) if of_text else partial(train_part_of_images, image_size=size)
            )
            trained = changed(train(new, flags=asked))
            trained.save_pretrained(final)
            opened = _opened(base, final, auto_class) if asked.lora else [load(final, 2, auto_class=auto_class)]
            found = [logits(one, kind, auto_class) for one in (trained, *opened)]
        except InputError as refusal:
            return shortened(f"refused: {refusal}")
        except Exception as error:
            return shortened(f"wrong: {type(error).__name__}: {error}")
    return _compared(found)


def _row_of_image_text(model: Architecture) -> str:
    def load_whole() -> Any:
        return getattr(transformers, IMAGE_TEXT).from_pretrained(base)

    @torch.no_grad()
    def found_by(one: nn.Module) -> Tensor:
        return one.eval()(**{name: entry for name, entry in model.batch().items() if name != "labels"}).logits

    with TemporaryDirectory() as folder:
        base, final = Path(folder, "base"), Path(folder, "final")
        try:
            cast(Any, model.build()).save_pretrained(base)
            trained = changed(train_part_of_image_text(load_whole(), Flags(lora=True, lora_rank=2)))
            expected = found_by(trained)
        except InputError as refusal:
            return shortened(f"refused: {refusal}")
        except Exception as error:  # peft's model hands blip an argument twice
            return shortened(f"not built: {type(error).__name__}: {error}")
        try:
            trained.save_pretrained(final)
            by_recipes = load_adapters(load_whole(), final, task_type="CAUSAL_LM", source="final")
            by_peft = PeftModel.from_pretrained(load_whole(), str(final), is_trainable=True)
            return _compared([expected, found_by(by_recipes), found_by(by_peft)])
        except InputError as refusal:
            return shortened(f"refused: {refusal}")
        except Exception as error:
            return shortened(f"wrong: {type(error).__name__}: {error}")


def _compared(found: list[Tensor]) -> str:
    largest = max(float((one - found[0]).abs().max()) for one in found[1:])
    return IDENTICAL if largest == 0 else f"within {ROUNDING:g}" if largest <= ROUNDING else f"wrong: by {largest:.1g}"


def _opened(base: Path, final: Path, auto_class: str) -> list[nn.Module]:
    """Adapters that were saved, each time under another seed."""
    task_type = CLASSIFIER if auto_class == CLASSIFICATION else None
    by_recipes = load_adapters(load(base, 2, auto_class=auto_class), final, task_type=task_type, source="final")
    other = load(base, 3, auto_class=auto_class)
    by_peft = PeftModel.from_pretrained(other, str(final), is_trainable=True)  # frozen ones round otherwise
    return [by_recipes, by_peft]


def rows_so_far(path: Path = ROWS) -> dict[tuple[str, str], str]:
    """The rows of a file, by family and type."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(family, kind): row for family, kind, row in map(json.loads, lines)}


def main(arguments: list[str]) -> int:
    """Find the rows that ``arguments`` name and the file lacks; the exit code."""
    parser = argparse.ArgumentParser("zoo.heads")
    parser.add_argument("names", nargs="*", help="families, or FAMILY:TYPE; all three without one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--flags", choices=("lora", "freeze_backbone"), help="what trains; such rows are only printed")
    options = parser.parse_args(arguments)
    found = {family: types for family, types in families().items() if family in (CLASSIFICATION, IMAGES, IMAGE_TEXT)}
    named = {(f, t): one for f, types in found.items() for t, one in types.items() if is_named(options.names, f, t)}
    left = {name: model for name, model in named.items() if options.flags or name not in rows_so_far()}
    import_in_advance()
    transformers.logging.disable_progress_bar()
    make_row, lost = partial(row_of, flags=options.flags), {}
    for name, row in tqdm(rows_of(left, options.processes, make_row), total=len(left), delay=5, disable=None):
        if options.flags:
            print(*name, row, flush=True)
            lost |= {name: row} if row.startswith(LOST) else {}
            continue
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*name, row]) + "\n")
    lost = lost if options.flags else {name: row for name, row in rows_so_far().items() if row.startswith(LOST)}
    for (family, kind), row in lost.items():
        print(f"{family}:{kind}: {row}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
