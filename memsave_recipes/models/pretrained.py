"""Models of transformers: from a folder or the Hub, or from scratch by type; weights from safetensors, never pickle.

A folder of adapters names the model that they were trained on; ``adapters.py`` puts them into it.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.masking_utils import sdpa_mask
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import first_of, printable, read_json, sanitized
from memsave_recipes.models.deferred_init import deferred_init
from memsave_recipes.models.flags import option
from memsave_recipes.models.fused_ops import FusedOps, fuse_operators
from memsave_recipes.models.hub import ask_hub_for, folder_of, reason
from memsave_recipes.models.labels import REGRESSION, SINGLE, ProblemType
from memsave_recipes.models.slices import ON_META, WholeOnly, leave_in_files, made_whole, mark_as_read

LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, ImportError, ArithmeticError, AssertionError, AttributeError),
    *(RuntimeError, IndexError, SafetensorError, StrictDataclassError),
)
"""What damaged files and impossible configurations raise; of the RuntimeErrors not those of memory."""
MOST_LAYERS = 2000
SIZES = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    "max_position_embeddings",
)
"""Entries of a configuration, under the names that transformers maps to those of a type."""
ADAPTER_CONFIG = "adapter_config.json"
BASE = "base"
"""The folder beside adapters of a model from scratch that holds its weights."""
BASE_DIGEST = "base_digest.json"
"""Beside adapters: what the files of their base were."""
PIECES, PIECE_BYTES = 64, 4096  # of each of them, evenly spaced
LABELS = "id2label.json"
MOST_NAMED = 3  # tensors in a line
VOCAB_SIZE = 8192
LOGGER = logging.getLogger(__name__)
Built = TypeVar("Built", PreTrainedConfig, PreTrainedModel)


@dataclass(kw_only=True)
class TransformerArguments:
    """The model of transformers and its attention.

    Attributes:
        dropout: probability in all layers that ``--config_overrides`` does not set; by default the model's.
    """

    model_name_or_path: str | None = option(
        None,
        "folder or Hub id of a transformers model to fine-tune, or folder of its LoRA adapters",
        shown="first",
        resume="place",
    )
    model_type: str | None = option(None, "type of a transformers model to train from scratch, such as gpt2")
    config_overrides: str | None = option(
        None,
        'entries of the configuration of --model_type, such as "n_layer=4,n_head=4"; of a part: '
        '"text_config.hidden_size=64"',
    )
    attn_implementation: str | None = option(
        None, "attention kernel: eager, sdpa, flash_attention_2, ...; default: transformers' choice"
    )
    trust_remote_code: bool = option(False, "run the code that comes with a model of the Hub")
    fused_ops: FusedOps = option(
        "auto",
        "auto: run each GELU and RMSNorm that the model writes in Python as one operator of torch, if results are the "
        "same within rounding; none: leave the model as it is",
        resume="chosen",
        rounds="a fused operator rounds in another way than those that it is in place of",
        before="none",
    )
    dropout: float | None = None

    def __post_init__(self) -> None:
        if (self.model_name_or_path is None) == (self.model_type is None):
            raise InputError("give one of --model_name_or_path and --model_type")
        self.check_transformer()

    def check_transformer(self) -> None:
        """Raise ``InputError`` where flags contradict each other."""
        if self.config_overrides is not None and self.model_type is None:
            raise InputError("--config_overrides is for a model from scratch: give it with --model_type")

    @property
    def vocab_size(self) -> int:
        """Most tokens of a tokenizer that is trained for the model, as ``--config_overrides`` says."""
        entries = dict(entry.partition("=")[::2] for entry in (self.config_overrides or "").split(","))
        size = entries.get("vocab_size", entries.get("text_config.vocab_size", ""))
        return int(size) if size.isascii() and size.isdigit() else VOCAB_SIZE

    @property
    def name(self) -> str:
        """The model's name in tables and dashboards; of the ``final/`` of a run, the name of the run."""
        source = str(self.model_name_or_path)
        path = Path(os.path.abspath(source)) if os.path.isdir(source) else Path(source)
        return self.model_type or (path.parent.name if path.name == "final" else path.name)

    @property
    def adapter(self) -> str | None:
        """``--model_name_or_path`` where it is a folder of adapters."""
        name = self.model_name_or_path
        return name if name is not None and is_adapter(name) else None

    @property
    def base_name_or_path(self) -> str | None:
        """``--model_name_or_path``, or the model that its adapters were trained on."""
        return self.model_name_or_path if self.adapter is None else base_of_adapter(self.adapter)

    @property
    def tokenizer_name_or_path(self) -> str | None:
        """Where the model's tokenizer is: a folder of adapters may have its own."""
        has_own = self.adapter is None or os.path.isfile(os.path.join(self.adapter, "tokenizer_config.json"))
        return self.model_name_or_path if has_own else self.base_name_or_path

    @property
    def model_labels(self) -> tuple[str, ...] | None:
        """The classes of ``--model_name_or_path``, in the order of its outputs; ``None`` for a model from scratch."""
        if self.model_name_or_path is None:
            return None
        names: Any = configuration_of(self).id2label if self.adapter is None else read_labels(self.adapter)
        return tuple(str(names[index]) for index in range(len(names)))

    @property
    def model_problem(self) -> ProblemType | None:
        """The ``problem_type`` of ``--model_name_or_path``; ``None`` for a model from scratch."""
        if self.model_name_or_path is None:
            return None
        return problem_of(configuration_of(self)) if self.adapter is None else read_problem(self.adapter)


def problem_of(config: PreTrainedConfig) -> ProblemType:
    """Return the ``problem_type`` of a classifier, or the one that transformers trains without."""
    problem: ProblemType | None = config.problem_type
    return problem or (REGRESSION if config.num_labels == 1 else SINGLE)


def is_adapter(name_or_path: str | Path) -> bool:
    """Tell whether it is a folder of adapters, in the layout of peft."""
    return os.path.isfile(os.path.join(name_or_path, ADAPTER_CONFIG))


def adapter_config(folder: str | Path) -> dict[str, Any]:
    """Read the entries of ``adapter_config.json``; raise ``InputError`` where that fails."""
    path = Path(folder, ADAPTER_CONFIG)
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({reason(error)}): take another folder of adapters") from error
    return content if isinstance(content, dict) else {}


def read_labels(adapter: str | Path) -> dict[int, str]:
    """Read the names of the classes that adapters were trained on; raise ``InputError`` where that fails."""
    try:
        content = sanitized(read_json(Path(adapter, LABELS).read_text(encoding="utf-8")))
        return {index: str(content[str(index)]) for index in range(len(content) - ("problem_type" in content))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{adapter} has no {LABELS} with the names of the classes: take one of our recipes'"
        ) from error


def read_problem(adapter: str | Path) -> ProblemType:
    """Read the ``problem_type`` that adapters were trained for, beside the names of the classes."""
    with suppress(OSError, ValueError, AttributeError):
        problem: Any = read_json(Path(adapter, LABELS).read_text(encoding="utf-8")).get("problem_type")
        if problem in get_args(ProblemType):
            return cast(ProblemType, problem)
    return SINGLE


def base_of_adapter(folder: str | Path) -> str:
    """Read the name of the model that adapters were trained on; raise ``InputError`` where there is none."""
    base, beside = adapter_config(folder).get("base_model_name_or_path"), Path(folder, BASE)
    if beside.is_dir():
        return str(beside)
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{Path(folder, ADAPTER_CONFIG)} names no base model: write its folder or Hub id into "
            "base_model_name_or_path"
        )
    return base


def write_base_digest(folder: Path) -> None:
    """Write what the files of the base of the adapters in ``folder`` are, if they are here."""
    if (digest := _digest_of_base(base_of_adapter(folder))) is not None:
        (folder / BASE_DIGEST).write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")


def check_base(folder: str | Path) -> None:
    """Say in a line where the base of adapters has other files than when they were saved."""
    known, now = None, _digest_of_base(base := base_of_adapter(folder))
    with suppress(OSError, ValueError, AttributeError):
        known = read_json(Path(folder, BASE_DIGEST).read_text(encoding="utf-8")).get("digest")
    if known is not None and now not in (None, known) and os.environ.get("LOCAL_RANK", "0") == "0":
        LOGGER.warning("note: the weights of %s have changed since the adapters of %s were saved", base, folder)


def _digest_of_base(name: str) -> str | None:
    """Return a digest of pieces of the weights' files: an edit of less than a 64th of a file may not change it."""
    digest, files = hashlib.blake2b(digest_size=16), sorted(folder_of(name).glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with open(path, "rb") as file:
            for piece in range(PIECES):
                file.seek(piece * size // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest() if files else None


def missing_base(source: str | Path, base: str, error: BaseException) -> InputError:
    """Return the refusal of adapters whose base model cannot be loaded; ``source`` names their folder."""
    why = "no such folder" if os.path.isabs(base) and not os.path.isdir(base) else reason(error)
    return InputError(
        f"{source} holds adapters of {base}, which cannot be loaded ({why}): put that "
        f"model there, or name another place as base_model_name_or_path in {ADAPTER_CONFIG}"
    )


def build_transformer(
    auto_class: Any,
    flags: TransformerArguments,
    *,
    dtype: torch.dtype,
    in_4bit: bool = False,
    with_weights: bool = True,
    slices_on: torch.device | None = None,
    **config_changes: Any,
) -> PreTrainedModel:
    """Build the model that the flags name, ready to train: ``from_pretrained`` alone leaves dropout off.

    Args:
        auto_class: such as ``AutoModelForCausalLM``.
        with_weights: else a pretrained model is only made by its configuration, and no weights are read.
        slices_on: the device of a rank that is to have a shard of the weights: where they can, they then stay in their
            files, or are drawn later, as ``slices_of`` the model tells.
        in_4bit: pack the linear layers' weights on the current CUDA device; they cannot train.
        **config_changes: such as ``id2label``; those of a tokenizer only count for a model from scratch.

    Raises:
        InputError: no such model, overrides that it does not know, or code of its own without ``--trust_remote_code``.
    """
    if in_4bit and not with_weights:
        raise InputError("--load_in_4bit packs weights on a CUDA device, which cannot be estimated: leave it out")
    if flags.model_name_or_path is None and in_4bit:
        raise InputError("--load_in_4bit packs weights that are there already: give --model_name_or_path")
    whole: Callable[[], PreTrainedModel]
    in_slices: Callable[[torch.device], PreTrainedModel]
    if flags.model_name_or_path is not None and with_weights:
        whole = load = partial(_from_pretrained, auto_class, flags, dtype, in_4bit, config_changes)
        in_slices = partial(leave_in_files, load, str(flags.base_name_or_path))
    else:
        make = partial(_by_configuration, auto_class, flags, config_changes)
        whole, in_slices = partial(_in_dtype, make, dtype), partial(deferred_init, make, dtype)
    build = whole if slices_on is None else partial(_in_slices, partial(in_slices, slices_on), whole)
    model = _naming_the_model(flags, build)
    if not with_weights and _freezes(flags):
        with unset_fake_temporarily():
            load = partial(_from_pretrained, auto_class, flags, dtype, False, config_changes, device_map=ON_META)
            mark_as_read(model, by=_naming_the_model(flags, load))
    if flags.fused_ops == "auto":
        fuse_operators(model)
    model.train()
    return model


def _freezes(flags: TransformerArguments) -> bool:
    """Tell whether a model whose files are here is frozen in part, so that it matters which weights these lack."""
    files = [Path(flags.base_name_or_path or "", name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    asked = any(getattr(flags, name, None) for name in ("lora", "freeze_backbone"))
    return asked and any(file.is_file() for file in files)


def build_text_classifier(
    flags: TransformerArguments,
    label_names: tuple[str, ...],
    dtype: torch.dtype,
    *,
    problem_type: ProblemType = SINGLE,
    **options: Any,
) -> PreTrainedModel:
    """Build the text classifier that the flags name, with one output a label, as ``build_transformer`` does.

    ``pad_token_id`` has to be among the options.
    """
    model = build_transformer(
        AutoModelForSequenceClassification,
        flags,
        dtype=dtype,
        id2label=dict(enumerate(label_names)),
        label2id={name: index for index, name in enumerate(label_names)},
        problem_type=problem_type,
        **options,
    )
    config = model.config.get_text_config()
    config.use_cache = False  # decoders would fill it again when they recompute
    if config.pad_token_id is None:  # decoders look for a text's last token by it
        config.pad_token_id = options["pad_token_id"]
    if model.config.is_encoder_decoder and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = model.config.pad_token_id  # as in T5's own configurations
    return model


@contextmanager
def padding_known(is_padded: bool | None) -> Iterator[None]:
    """Tell a forward inside whether its rows are padded, so that it makes the masks it would make without asking.

    transformers leaves out a mask that hides nothing. To find that out, it waits for the device.

    Args:
        is_padded: whether any row is; ``None``: not known.
    """

    def mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if is_padded and attention_mask is not None:
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(attention_mask=attention_mask if is_padded else None, **options)

    AttentionMaskInterface.register("sdpa", sdpa_mask if is_padded is None else mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", sdpa_mask)


def configuration_of(flags: TransformerArguments) -> PreTrainedConfig:
    """Return the configuration of the model that the flags name, without the model; raises as ``build_transformer``."""
    return _naming_the_model(flags, lambda: _configuration(flags, {}))


def check_files(folder: str | Path) -> None:
    """Raise ``InputError`` where the index of a model's files names others than safetensors in ``folder``."""
    index = Path(folder, SAFE_WEIGHTS_INDEX_NAME)
    if not index.is_file():
        return
    try:
        names = set(read_json(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index} cannot be read ({reason(error)}): take another copy of the model") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index} names {name!r}, which is not a .safetensors file next to it: take another model")
        if (file := Path(folder, name)).exists() and not file.is_file():  # a pipe may never end
            raise InputError(f"{index} names {name!r}, which is not a file: take another model")


def check_configuration(config: PreTrainedConfig) -> None:
    """Raise ``ValueError`` for sizes of no model, or of one that takes hours to build, and for text that is no list."""
    if not isinstance(config.architectures or [], list):
        raise ValueError("architectures is not a list")
    parts = [one for one in vars(config).values() if isinstance(one, PreTrainedConfig)]
    for described in (config, *parts):
        entries = vars(described)
        for size in SIZES:
            name = described.attribute_map.get(size, size)
            if isinstance(entries.get(name), int) and entries[name] < 1:
                raise ValueError(f"{name}={entries[name]} is less than 1")
        for name, value in entries.items():
            counts = [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, int)]
            if name.endswith(("layers", "layer", "depths")) and max(counts, default=0) > MOST_LAYERS:
                raise ValueError(f"{name}={max(counts)} is more than {MOST_LAYERS}")


def _in_dtype(make: Callable[[], PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    model = make()
    model.to(dtype)  # type: ignore[arg-type]  # a decorator of transformers hides the type of its ``to``
    return model


def _by_configuration(auto_class: Any, flags: TransformerArguments, config_changes: dict[str, Any]) -> PreTrainedModel:
    config = _configuration(flags, config_changes)
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ValueError(f"its weights are quantized ({method or 'unknown'}), which is not counted: name the original")
    model: PreTrainedModel = auto_class.from_config(
        config, attn_implementation=flags.attn_implementation, trust_remote_code=flags.trust_remote_code
    )
    return model


def _configuration(flags: TransformerArguments, config_changes: dict[str, Any]) -> PreTrainedConfig:
    make = _config_from_scratch if flags.model_name_or_path is None else _pretrained_config
    return make(flags, config_changes)


def _config_from_scratch(flags: TransformerArguments, config_changes: dict[str, Any]) -> PreTrainedConfig:
    config_changes = _sides_of_an_image(str(flags.model_type), config_changes)
    config: PreTrainedConfig = AutoConfig.for_model(str(flags.model_type), **config_changes)
    overrides: dict[str, Any] = {}
    if flags.config_overrides is not None:
        # Gemma 4 otherwise refuses to read an entry that layers may override.
        config.allow_global_per_layer_attribute_access = True
        overrides = _read_overrides(config, flags.config_overrides.split(","))
        check_configuration(config)
        # Made anew, because derived entries (the types of the layers, say) are derived only at the start.
        _check_overrides(overrides, config_changes)
        config = AutoConfig.for_model(str(flags.model_type), **_merged(config_changes, overrides))
    _set_dropout(config, flags.dropout, but=overrides)
    _drop_padding_outside_the_vocabulary(config)
    config.architectures = config.architectures or []  # transformers chooses by it between two classes (DeiT, LeViT)
    return config


def _read_overrides(config: PreTrainedConfig, pairs: Sequence[str]) -> dict[str, Any]:
    """Set the entries ``name=value``, or ``part.name=value``, in ``config``; return them, those of a part below it.

    A part is made of its own type's defaults and of what is named of it.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, is_nested, rest = pair.partition("=")[0].partition(".")
        part = getattr(config, name, None)
        if is_nested and isinstance(part, PreTrainedConfig):
            entries = found.setdefault(name, {"model_type": part.model_type})
            entries |= _read_overrides(part, [pair.partition(".")[2]])
            continue
        config.update_from_string(pair)
        found[name + is_nested + rest] = getattr(config, name)
    return found


def _merged(entries: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return ``entries`` with those of ``others``, also of the dictionaries in both."""
    both = [name for name, other in others.items() if isinstance(entries.get(name), dict) and isinstance(other, dict)]
    return entries | others | {name: _merged(entries[name], others[name]) for name in both}


def _sides_of_an_image(model_type: str, config_changes: dict[str, Any]) -> dict[str, Any]:
    """Change ``image_size`` to what this type takes: one figure, or a list of both sides as Hiera."""
    size = config_changes.get("image_size")
    if size is not None and isinstance(getattr(AutoConfig.for_model(model_type), "image_size", None), list | tuple):
        return config_changes | {"image_size": [size, size]}
    return config_changes


def _drop_padding_outside_the_vocabulary(config: PreTrainedConfig) -> None:
    """Drop a type's own padding token where the tokenizer at hand has fewer tokens."""
    padding, vocab_size = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
    if isinstance(padding, int) and isinstance(vocab_size, int) and padding >= vocab_size:
        config.pad_token_id = None  # transformers refuses it for ModernBERT's decoder, which has to have one


def _check_overrides(overrides: dict[str, Any], config_changes: dict[str, Any]) -> None:
    """Refuse a negative number of layers, which would be taken for none, and other classes than the data's."""
    if "num_labels" in overrides and "id2label" in config_changes:
        raise ValueError("num_labels follows from the data")
    for name, value in overrides.items():
        if isinstance(value, int) and value < 0 and not name.endswith("_token_id"):
            raise ValueError(f"{name}={value} is negative")


def _pretrained_config(flags: TransformerArguments, config_changes: dict[str, Any]) -> PreTrainedConfig:
    of_a_tokenizer = {name for name in config_changes if name == "vocab_size" or name.endswith("_token_id")}
    changes = {name: value for name, value in config_changes.items() if name not in of_a_tokenizer}
    source = {"trust_remote_code": flags.trust_remote_code}
    config: PreTrainedConfig = AutoConfig.from_pretrained(str(flags.base_name_or_path), **source, **changes)
    check_configuration(config)
    _set_dropout(config, flags.dropout)
    return config


def _from_pretrained(
    auto_class: Any,
    flags: TransformerArguments,
    dtype: torch.dtype,
    in_4bit: bool,
    config_changes: dict[str, Any],
    **options: Any,
) -> PreTrainedModel:
    config = _pretrained_config(flags, config_changes)
    if in_4bit:
        nf4 = BitsAndBytesConfig(  # of QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314)
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16,
        )
        options = {"quantization_config": nf4, "device_map": {"": torch.cuda.current_device()}}
    return load_weights_of(
        auto_class,
        str(flags.base_name_or_path),
        new_head="id2label" in config_changes,  # a head for other classes is a new head
        says=flags.adapter is None and options.get("device_map") != ON_META,  # adapters bring the head
        config=config,
        dtype=dtype,
        attn_implementation=flags.attn_implementation,
        trust_remote_code=flags.trust_remote_code,
        **options,
    )


def load_weights_of(
    auto_class: Any, source: str | Path, *, new_head: bool, says: bool = True, **options: Any
) -> PreTrainedModel:
    """Load a model by ``from_pretrained``, whose report of several lines becomes one, if this process ``says`` it.

    Raises what transformers does, and ``ValueError`` for a tensor of another shape, unless it may be a ``new_head``.
    """
    reports: list[str] = []
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        reports.extend([record.getMessage()] * is_report)
        return not is_report

    logger.addFilter(is_other)
    try:
        options |= {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, found = auto_class.from_pretrained(source, **options)
    except RuntimeError as error:
        if "CONVERSION" not in str(error):
            raise
        names = [line.split("|")[0] for report in reports for line in report.splitlines() if "CONVERSION" in line]
        raise ValueError(f"transformers cannot convert its {first_of(names, 1)}") from error
    finally:
        logger.removeFilter(is_other)
    for name, there, here in sorted(found["mismatched_keys"]) if not new_head else ():
        raise ValueError(f"its files hold {name} of {tuple(there)}, and the model's is {tuple(here)}")
    new = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    unread = sorted(found["unexpected_keys"])
    lines = [f"new, at random: {first_of(new, MOST_NAMED)}"] if new else []
    lines += [f"in its files and not read: {first_of(unread, MOST_NAMED)}"] if unread else []
    if lines and says and os.environ.get("LOCAL_RANK", "0") == "0":
        LOGGER.warning("note: tensors of %s: %s", source, printable("; ".join(lines)))
    return cast(PreTrainedModel, model)


def _in_slices(in_slices: Callable[[], PreTrainedModel], whole: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Make the model without its weights, or where that cannot be the ``whole`` one with the same random numbers."""
    state = torch.get_rng_state()
    try:
        return in_slices()
    except WholeOnly as error:
        why = str(error)
    except LOADING_ERRORS as error:
        why = f"without them the model cannot be made ({reason(error)})"
    torch.set_rng_state(state)
    return made_whole(whole(), why)


def image_processor_config(name_or_path: str | None) -> dict[str, Any]:
    """Read the image processor's entries of a pretrained model, such as ``image_mean``; none without such a file."""
    if name_or_path is not None:
        ask_hub_for(name_or_path)
        with suppress(OSError):
            return ImageProcessingMixin.get_image_processor_dict(name_or_path)[0]
    return {}


def open_image_processor(name_or_path: str | Path, *, trust_remote_code: bool) -> Any:
    """Open the image processor of a folder or of the Hub; raises whatever transformers does."""
    try:
        return AutoImageProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except ImportError:  # transformers 5.17 asks for torchvision, also for a class that needs PIL alone
        name = image_processor_config(str(name_or_path)).get("image_processor_type", "")
        if (of_pil := getattr(transformers, f"{name.removesuffix('Fast')}Pil", None)) is None:
            raise
        return of_pil.from_pretrained(name_or_path)


def _set_dropout(config: PreTrainedConfig, probability: float | None, but: Collection[str] = ()) -> None:
    """Set all dropouts ``but`` some: transformers has a name for each, and no two models share all of them."""
    if probability is None:
        return
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            given = but[name] if isinstance(but, dict) and isinstance(but.get(name), dict) else ()
            _set_dropout(part, probability, given)
    for name, value in config.to_dict().items():
        is_rate = isinstance(value, int | float) and not isinstance(value, bool) and name not in but
        if ("dropout" in name or "pdrop" in name) and is_rate:
            setattr(config, name, probability)


def _naming_the_model(flags: TransformerArguments, build: Callable[[], Built]) -> Built:
    base = flags.base_name_or_path
    if base is not None:
        ask_hub_for(base)
        check_files(base)
    try:
        return build()
    except LOADING_ERRORS as error:
        if is_out_of_memory(error):
            raise
        if flags.adapter is not None:
            raise missing_base(f"--model_name_or_path {flags.adapter}", str(base), error) from error
        name = flags.model_name_or_path or flags.model_type
        flags_to_check = "--model_type and --config_overrides" if flags.model_type else "--model_name_or_path"
        raise InputError(
            f"the transformers model {name} cannot be made: {reason(error)}; check {flags_to_check}"
        ) from error
