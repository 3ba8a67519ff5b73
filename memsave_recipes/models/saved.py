"""The ``final/`` of a run as a model: files that make others able to open it, and ``load``.

NOTE [ files of final/ ]
1. *transformers' models* have their own layout, with the image processor or the tokenizer next to the weights, so that
   ``from_pretrained`` and ``pipeline`` open the folder. ``Layout`` is that of their weights.
2. *VGG and DenseNet* have ``model.safetensors``, the ``config.json`` of ``convnets.py``, and an image processor.
3. *Adapters* have peft's layout and the tokenizer or image processor. A ``config.json`` would make transformers take
   the folder for a whole model, so the names of the classes, and what labels are, stand in ``id2label.json``.
4. *Images* are resized and normalised by ``BitImageProcessor``. Its PIL backend gives the pixels of training, up to
   rounding of the normalisation; its torchvision backend rounds resized pixels otherwise.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitImageProcessorPil,
    MobileViTImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.adapters import load_adapters
from memsave_recipes.models.convnets import CONFIG, ConvnetConfig
from memsave_recipes.models.hub import ask_hub_for, loading_by_name, open_tokenizer
from memsave_recipes.models.image_classifiers import GREY_BITS, MODELS, load_saved_convnet, read_convnet, read_grey_bits
from memsave_recipes.models.image_text import open_processor
from memsave_recipes.models.labels import SINGLE, ProblemType
from memsave_recipes.models.pretrained import (
    LABELS,
    LOADING_ERRORS,
    adapter_config,
    base_of_adapter,
    check_files,
    is_adapter,
    load_weights_of,
    missing_base,
    open_image_processor,
    problem_of,
    read_labels,
    read_problem,
)

TOKENIZER_CONFIG = "tokenizer_config.json"
COMPARED = 16
"""Samples of which a tokenizer that was saved has to make the same tokens."""
IMAGE_PROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
HINT = "take another copy"
BILINEAR = 2  # of PIL.Image.Resampling
SIDES, MAX_SIDE = ("height", "width", "shortest_edge", "longest_edge"), 10_000
"""Of an image that a processor makes, and how many pixels one may have."""

IMAGE_TEXT: Final = "image-text-to-text"
TaskName = Literal[  # as of transformers.pipeline
    "image-classification", "text-classification", "image-text-to-text", "text-generation"
]
KINDS: dict[TaskName, tuple[Any, dict[str, Any]]] = {
    "image-classification": (AutoModelForImageClassification, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "text-classification": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "image-text-to-text": (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "text-generation": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
}
OF_LABELS = ("image-classification", "text-classification")
OF_ADAPTERS: dict[str | None, TaskName] = {
    **{"SEQ_CLS": "text-classification", "CAUSAL_LM": "text-generation", None: "image-classification"}
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedModel:
    """A trained model in eval mode, with the image processor or tokenizer of transformers.

    ``label_names`` are the classes in the order of the logits; none of a language model. ``problem_type`` tells whether
    an input has one of them, several, or a number.
    """

    model: nn.Module
    task: TaskName
    processor: Any
    label_names: tuple[str, ...] = ()
    problem_type: ProblemType = SINGLE

    @property
    def grey_bits(self) -> int | None:
        """The bits of the values in grey images of 16 bits, in training; ``None`` where there were none."""
        return read_grey_bits(vars(self.processor))

    @torch.no_grad()
    def logits(self, inputs: Sequence[Any]) -> Tensor:
        """Return the (B, num_classes) logits, in at least float32, of PIL images, texts, or tuples of two texts."""
        weight = next(self.model.parameters())
        output = self.model(**self._encoded(inputs, weight.dtype).to(weight.device))
        logits: Tensor = getattr(output, "logits", output)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _encoded(self, inputs: Sequence[Any], dtype: torch.dtype) -> Any:
        if self.task == "image-classification":
            encoded = self.processor(list(inputs), return_tensors="pt").to(dtype)
            if not hasattr(self.model, "config"):  # our models call their argument ``images``
                encoded["images"] = encoded.pop("pixel_values")
            return encoded
        length = self.processor.init_kwargs.get("max_length")
        cut: dict[str, Any] = {"truncation": True, **({"max_length": length} if length else {})}
        if self.task == "text-classification" and self.model.config.is_encoder_decoder:  # type: ignore[union-attr]
            cut["split_special_tokens"] = True  # as in training: it counts end tokens
        return self.processor(list(inputs), padding=True, return_tensors="pt", **cut)


def save_image_classifier(
    folder: Path,
    *,
    architecture: str | None,
    label_names: tuple[str, ...],
    dtype: torch.dtype,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    bgr: bool = False,
    grey_bits: int | None = None,
    problem_type: ProblemType = SINGLE,
) -> None:
    """Write the image processor, with the resizing and normalisation of training, and our models' ``config.json``.

    Args:
        architecture: the name of our model; ``None`` for one of transformers, which writes its own configuration.
        mean, std: of each channel, for values from 0 to 1.
        bgr: whether the channels are in this order, with a mean of 0 and one deviation.
    """
    square = {"height": image_size, "width": image_size}
    own: dict[str, Any] = {} if grey_bits is None else {GREY_BITS: grey_bits}
    values = {"rescale_factor": 1 / (255 * std[0])} if bgr else {"image_mean": list(mean), "image_std": list(std)}
    (MobileViTImageProcessorPil if bgr else BitImageProcessorPil)(
        size={"shortest_edge": image_size},
        do_center_crop=True,
        crop_size=square,
        resample=BILINEAR,
        **values,
        **own,
    ).save_pretrained(folder)
    _save_labels(folder, label_names, problem_type)
    if architecture is not None:
        of_labels: dict[str, Any] = {"label_names": label_names, "problem_type": problem_type}
        config = ConvnetConfig(architecture=architecture, image_size=image_size, dtype=dtype, **of_labels)
        config.save(folder)


def save_tokenizer(folder: Path, *, tokenizer: PreTrainedTokenizerBase, samples: Any) -> None:
    """Write ``tokenizer`` beside its model in ``folder``, so that ``load`` opens it as it is.

    A line says where ``AutoTokenizer`` makes other tokens, by the class that it takes beside such a model.

    Args:
        samples: a data set of ``input_ids``; the texts of the first few are compared.
    """
    tokenizer.save_pretrained(folder)
    texts = [tokenizer.decode(samples[index]["input_ids"]) for index in range(min(COMPARED, len(samples)))]
    try:
        opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        is_same = opened(texts, verbose=False)["input_ids"] == tokenizer(texts, verbose=False)["input_ids"]
    except Exception:  # it brings code of its own; whatever is wrong with it, the model has to be saved
        return
    if is_same:
        return
    way_out = "give the model's own --tokenizer_name"
    if tokenizer.is_fast:
        path = folder / TOKENIZER_CONFIG
        own = {"tokenizer_class": "TokenizersBackend", "model_input_names": tokenizer.model_input_names}
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | own, indent=2) + "\n", "utf-8")
        way_out = "open it by PreTrainedTokenizerFast, as memsave predict does"
    taken = type(opened).__name__
    logger.warning(
        "note: AutoTokenizer takes %s for final/, which makes other tokens than this run: %s", taken, way_out
    )


def save_processor(folder: Path, *, processor: Any, texts: Sequence[str]) -> None:
    """Write the processor of a model of images and text beside it, so that ``AutoProcessor`` opens it.

    Args:
        texts: those of which the tokenizer that is saved has to make the same tokens.
    """
    processor.save_pretrained(folder)
    tokens = [{"input_ids": processor.tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    save_tokenizer(folder, tokenizer=processor.tokenizer, samples=tokens)


def save_text_processor(
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    samples: Any,
    max_length: int,
    label_names: Sequence[str],
    problem_type: ProblemType = SINGLE,
) -> None:
    """Write the tokenizer of a classifier, with the length at which texts end, and for adapters what labels are.

    Args:
        samples: as ``save_tokenizer``.
    """
    tokenizer("", truncation=True, max_length=max_length)  # a fast tokenizer saves the length that it cut to last
    save_tokenizer(folder, tokenizer=tokenizer, samples=samples)
    _save_labels(folder, label_names, problem_type)


def _save_labels(folder: Path, label_names: Sequence[str], problem_type: ProblemType) -> None:
    """Write the classes of adapters, and what labels are: beside adapters there is no ``config.json``."""
    if is_adapter(folder):
        content: dict[Any, str] = {**dict(enumerate(label_names)), "problem_type": problem_type}
        (folder / LABELS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ``save_pretrained`` puts the tensors of a model into files.

    Attributes:
        files: by the name of the file, the names of its tensors: there, and in the model.
        index: the content of ``model.safetensors.index.json``; ``None`` of one file, which has none.
    """

    files: dict[str, dict[str, str]]
    index: dict[str, Any] | None


def layout_of(model: nn.Module, max_file_bytes: int) -> Layout | None:
    """Return the layout of ``model``, whose tensors may be in shards: none is read.

    ``None`` where ``save_pretrained`` splits or joins tensors, and of models that are not transformers' own.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    left_out = model._keys_to_ignore_on_save or ()
    shapes = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
        if name not in left_out
    }
    names = {id(shape): name for name, shape in shapes.items()}
    saved = revert_weight_conversion(model, remove_tied_weights_from_state_dict(shapes.copy(), model))
    if any(id(shape) not in names for shape in saved.values()):
        return None
    split = split_torch_state_dict_into_shards(saved, max_shard_size=max_file_bytes)
    in_files = split.filename_to_tensors.items()
    about = {"total_parameters": model.num_parameters(), **split.metadata}
    return Layout(
        files={file: {name: names[id(saved[name])] for name in inside} for file, inside in in_files},
        index={"metadata": about, "weight_map": split.tensor_to_filename} if split.is_sharded else None,
    )


def load(folder: str | Path, *, trust_remote_code: bool = False) -> SavedModel:
    """Load what a recipe has saved, or a classifier or causal language model in transformers' or peft's layout.

    Args:
        folder: ``final/``, or the folder of the run around it.

    Raises:
        InputError: there is no model in it, a file is missing or damaged, or the base model of adapters is not there.
    """
    path = _model_folder(Path(folder))
    check_files(path)
    if is_adapter(path):
        return _load_adapters(path, trust_remote_code)
    config = read_convnet(path)
    return _load_transformer(path, trust_remote_code) if config is None else _load_convnet(path, config)


def _model_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name a run's --output_dir, or its final/")
    final = folder / "final"
    if final.is_dir():
        return final
    if (folder / "checkpoints").is_dir():
        raise InputError(f"{folder} has no final/, so its run is not finished: go on with --resume")
    if not (is_adapter(folder) or (folder / CONFIG).is_file()):
        raise InputError(f"{folder} holds no model: name a run's --output_dir, or its final/")
    return folder


def _load_convnet(path: Path, config: ConvnetConfig) -> SavedModel:
    model = MODELS[config.architecture](num_classes=len(config.label_names))
    load_saved_convnet(model, path, source=str(path))
    return SavedModel(
        model=model.to(config.dtype).eval(),
        task="image-classification",
        processor=_image_processor(path, trust_remote_code=False),
        label_names=config.label_names,
        problem_type=config.problem_type,
    )


def _load_transformer(path: Path, trust_remote_code: bool) -> SavedModel:
    options = {"trust_remote_code": trust_remote_code}
    with loading_by_name(str(path), f"the model of {path}", HINT):
        config = AutoConfig.from_pretrained(path, **options)
        task = _task_of(config, has_processor=_has_processor(path))
        if task is None:
            raise InputError(f"{path} holds {config.model_type}, no classifier or causal language model: take another")
        model = load_weights_of(KINDS[task][0], path, new_head=False, config=config, **options)
    is_classifier = task in OF_LABELS
    names = tuple(str(name) for _, name in sorted(config.id2label.items())) if is_classifier else ()
    return SavedModel(
        model=model.eval(),
        task=task,
        processor=_processor(task, path, trust_remote_code),
        label_names=names,
        problem_type=problem_of(config) if names else SINGLE,
    )


def _load_adapters(path: Path, trust_remote_code: bool) -> SavedModel:
    base, kind = base_of_adapter(path), adapter_config(path).get("task_type")
    if kind not in OF_ADAPTERS:
        raise InputError(f"{path} holds adapters for {kind}: take some for {', '.join(OF_ADAPTERS.values())}")
    task, options = OF_ADAPTERS[kind], {"trust_remote_code": trust_remote_code}
    task = IMAGE_TEXT if task == "text-generation" and _has_processor(path) else task
    names = read_labels(path) if task in OF_LABELS else {}
    ask_hub_for(base)
    check_files(base)
    try:
        config = AutoConfig.from_pretrained(base, **({"id2label": names} if names else {}), **options)
        brings_head = {"new_head": bool(names), "says": False}  # the adapters have it
        model = load_weights_of(KINDS[task][0], base, config=config, **brings_head, **options)
    except LOADING_ERRORS as error:
        raise missing_base(path, base, error) from error
    has_own = task != "text-generation" or (path / TOKENIZER_CONFIG).is_file()
    processor = _processor(task, path if has_own else base, trust_remote_code)
    if task.startswith("text"):
        of_text = config.get_text_config()
        if of_text.pad_token_id is None:
            of_text.pad_token_id = processor.pad_token_id
    adapted = load_adapters(model, path, task_type=kind, source=str(path)).eval()
    labels: dict[str, Any] = {"label_names": tuple(names.values()), "problem_type": read_problem(path)}
    return SavedModel(model=adapted, task=task, processor=processor, **labels)


def _has_processor(path: Path) -> bool:
    return any((path / name).is_file() for name in (PROCESSOR, IMAGE_PROCESSOR))


def _processor(task: TaskName, path: str | Path, trust_remote_code: bool) -> Any:
    if task == IMAGE_TEXT:
        return open_processor(str(path), flag="", trust_remote_code=trust_remote_code)
    if task == "image-classification":
        return _image_processor(Path(path), trust_remote_code)
    with loading_by_name(str(path), f"the tokenizer of {path}", HINT):
        return open_tokenizer(path, trust_remote_code=trust_remote_code)


def _task_of(config: Any, *, has_processor: bool) -> TaskName | None:
    """Find the task by the class that was saved; code of its own names its auto class instead.

    Without a processor beside it, a model that takes images is one of text alone.
    """
    named = set(config.architectures or ())
    own = getattr(config, "auto_map", None) or {}
    for task, (auto_class, classes) in KINDS.items():
        if task == IMAGE_TEXT and not has_processor:
            continue
        known = chain.from_iterable([one] if isinstance(one, str) else one for one in classes.values())
        if named & set(known) or auto_class.__name__ in own:
            return task
    return None


def _image_processor(path: Path, trust_remote_code: bool) -> Any:
    if not (path / IMAGE_PROCESSOR).is_file():
        raise InputError(f"{path} has no {IMAGE_PROCESSOR}, so size and normalisation are not known: take another")
    with loading_by_name(str(path), f"{path / IMAGE_PROCESSOR}", HINT):
        processor = open_image_processor(path, trust_remote_code=trust_remote_code)
        sizes = [dict(getattr(processor, name, None) or {}) for name in ("size", "crop_size")]
        sides = [size[name] for size in sizes for name in SIDES if size.get(name) is not None]
        if not all(0 < side <= MAX_SIDE for side in sides):
            raise ValueError(f"its images have sides of {sides} pixels")
        std = getattr(processor, "image_std", None)
        if processor.do_normalize and 0 in (std if isinstance(std, list | tuple) else [std]):
            raise ValueError("its image_std is 0")
    return processor
