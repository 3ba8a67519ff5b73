"""Adapters: low-rank updates of frozen layers.

They are LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685), by peft. Its layers are put into the model in place,
so the names of its blocks, and with them every activation plan, stay. What the files of the base did not hold (a new
head, pooler or projection) has random values, so it trains whole and is saved with the adapters: peft's
``modules_to_save``.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from memsave_recipes.core.errors import InputError, check_file, packages_of
from memsave_recipes.core.text import first_line, first_of
from memsave_recipes.models.flags import RULES, Rules, check_ranges, option
from memsave_recipes.models.slices import new_weights, take_whole

if TYPE_CHECKING:  # peft takes its time to import, and imports bitsandbytes: only a run with adapters pays for it
    from peft import PeftModel

LINEAR = (nn.Linear, Conv1D)  # the latter is GPT-2's
CONVS = (nn.Conv1d, nn.ConvTranspose1d)  # which have weights of three dimensions, as experts have
ALWAYS_COPIED = {"CAUSAL_LM": (), "SEQ_CLS": ("classifier", "score"), None: ()}
"""Endings of the modules of which peft trains a copy in any case, by the kind of task; it has none for images."""
OF_IMAGES = "images"  # a kind of task that peft has no word for
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # of which peft makes no copy
ADAPTER_WEIGHTS = "adapter_model.safetensors"
DEFAULTS = {"lora_alpha": 32, "lora_dropout": 0.0}
"""Of entries that ``--lora_config`` may have."""
NOT_TAKEN = {
    "r": "give --lora_rank",
    **dict.fromkeys(("task_type", "peft_type", "auto_mapping", "fan_in_fan_out"), "it follows from the model"),
    **dict.fromkeys(("base_model_name_or_path", "revision", "inference_mode"), "it follows from the run"),
    **dict.fromkeys(("init_lora_weights", "loftq_config", "layer_replication"), "it may change the weights below"),
}
"""Entries of peft's configuration that the file cannot have, and why."""


@dataclass(kw_only=True)
class LoraArguments:
    """Adapters instead of all weights.

    Attributes:
        lora_entries: what the file of ``--lora_config`` says, so that a resumed run has the same.
    """

    lora: bool = option(False, "train low-rank adapters and freeze the weights")
    lora_rank: int = option(16, "rank of the update of each layer", least=1)
    lora_config: str | None = option(
        None,
        "YAML or JSON with further entries of peft's LoraConfig, such as target_modules, use_dora, lora_alpha "
        "(32 without); includes --lora",
        resume="place",
    )
    load_in_4bit: bool = option(False, "keep the frozen weights in 4-bit NF4 (with --lora, on CUDA)")
    lora_entries: dict[str, Any] | None = field(default=None, metadata={RULES: Rules(file_of="--lora_config")})

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.lora_config is not None:
            self.lora, self.lora_entries = True, _read_entries(self.lora_config)
        if self.load_in_4bit:
            self._check_4bit()
        if (adapter := self._adapter) is not None:
            self._check_adapter(adapter)

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters: new ones by ``--lora``, or those of ``--model_name_or_path``."""
        return self.lora or self._adapter is not None

    @property
    def _adapter(self) -> str | None:
        """``TransformerArguments.adapter``, where a recipe has these flags as well."""
        return getattr(self, "adapter", None)

    def _check_adapter(self, folder: str) -> None:
        """Check that flags do not ask for other adapters than those of a folder."""
        from memsave_recipes.models.pretrained import adapter_config  # needs an extra, and the planner imports this

        if self.lora_config is not None:
            raise InputError(f"--lora_config {self.lora_config}: {folder} holds adapters with their own: leave it out")
        asked, there = self.lora_rank, adapter_config(folder).get("r")
        if asked not in (LoraArguments.lora_rank, there):
            raise InputError(f"--lora_rank {asked}: the adapters of {folder} have {there}: leave it out")

    def _check_4bit(self) -> None:
        if not self.has_adapters:
            raise InputError("--load_in_4bit freezes the weights, so nothing is left to train: pass --lora")
        if not torch.cuda.is_available():
            raise InputError("--load_in_4bit needs a CUDA device, and there is none: leave it out")
        if find_spec("bitsandbytes") is None:
            raise InputError("--load_in_4bit needs bitsandbytes: pip install 'memsave-recipes[bitsandbytes]'")


def _read_entries(path: str) -> dict[str, Any]:
    """Read the entries of peft's configuration in a file; raise ``InputError`` where it has others."""
    with packages_of("text", "adapters"):
        from peft import LoraConfig

    flag = f"--lora_config {path}"
    check_file("--lora_config", path)
    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.safe_load(file)  # which reads JSON, too
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{flag} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise InputError(f"{flag} must hold lines like `lora_alpha: 16`")
    known = {one.name for one in fields(LoraConfig)}
    for name in entries:
        if name in NOT_TAKEN:
            raise InputError(f"{flag}: {name} is not for this file ({NOT_TAKEN[name]}): take it out")
        if name not in known:
            raise InputError(f"{flag}: {name} is no entry of peft's LoraConfig: correct it, or take it out")
    return entries


def add_lora(model: Any, flags: LoraArguments, *, task_type: str | None, within: str = "") -> Any:
    """Give ``model`` adapters, new ones or those of a folder, in place, freeze all else, and return peft's model.

    Args:
        task_type: ``CAUSAL_LM``; ``SEQ_CLS`` or, of images, ``None``, which train the head in any case.
        within: the name of the part of the model whose layers get adapters.

    Raises:
        InputError: none of the target modules is there; peft would not read back what it writes of them; as
            ``copied_modules``; or as ``load_adapters``.
    """
    if not flags.has_adapters:
        return model
    with packages_of("text", "adapters"):
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if flags.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if flags._adapter is not None:
        source = f"--model_name_or_path {flags._adapter}"
        return load_adapters(model, flags._adapter, task_type=task_type, source=source)
    entries = DEFAULTS | (flags.lora_entries or {})
    copied = [*copied_modules(model, task_type), *_named_modules(model, entries.pop("modules_to_save", None) or ())]
    take_whole(model, copied)
    targets = entries.pop("target_modules", None) or _targets(model, task_type, copied)
    if within:
        targets = [name for name in _adaptable(model, set()) if name.startswith(f"{within}.") and _is_in(name, targets)]
    source = "--lora" if flags.lora_config is None else f"--lora_config {flags.lora_config}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers under an old name
            config = LoraConfig(
                r=flags.lora_rank,
                target_modules=targets,
                task_type=task_type,
                modules_to_save=copied or None,
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
                **{"exclude_modules": _linear_routers(model) or None, **entries},
            )
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
            _check_come_back(adapted, source)
            return adapted
    except InputError:
        raise
    except ValueError as error:
        if "groups" in str(error) or "odules" not in str(error):
            raise InputError(f"{source}: {first_line(error)}: change the file") from error
        found = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in _adaptable(model, set()))) or "none"
        raise InputError(f"{source}: no such layers in this model (linear ones: {found})") from error
    except (TypeError, AttributeError) as error:  # of entries of a wrong kind
        raise InputError(f"{source}: {first_line(error)}: change the file") from error


def _check_come_back(model: Any, source: str) -> None:
    """Raise ``InputError`` where peft, which renames what it reads, finds no place for adapters that it has written."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    read: Any = set_peft_model_state_dict(model, get_peft_model_state_dict(model, save_embedding_layers=False))
    lost = [name for name in read.missing_keys if ".lora_" in name]
    if lost:
        layer = lost[0].removeprefix("base_model.model.").partition(".lora_")[0]
        raise InputError(
            f"{source}: peft writes adapters of {layer} that it does not read again: name other target_modules in "
            "--lora_config"
        )


def _targets(model: nn.Module, task_type: str | None, copied: Sequence[str]) -> list[str] | str:
    """Name the layers to adapt as peft takes them; of images, whose heads peft does not know, one by one."""
    if task_type is not None:
        return "all-linear"
    return [*_adaptable(model, {weight for name in copied for weight in model.get_submodule(name).parameters()})]


def _is_in(name: str, targets: Sequence[str] | str) -> bool:
    """Tell as peft does whether a linear layer is among the target modules."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _adaptable(model: nn.Module, whole: set[nn.Parameter]) -> dict[str, Any]:
    """Return the linear layers by name, or the convolutions where there are none, but those with ``whole`` weights."""
    left = {name: one for name, one in model.named_modules() if getattr(one, "weight", None) not in whole}
    linear: dict[str, Any] = {name: one for name, one in left.items() if isinstance(one, LINEAR)}
    return linear or {name: one for name, one in left.items() if isinstance(one, nn.Conv2d) and one.groups == 1}


def _named_modules(model: nn.Module, endings: Sequence[str]) -> list[str]:
    """Name the modules to save beside the adapters; one that shares a weight is refused, as a copy would not."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found: list[str] = []
    for ending in endings:
        names = [name for name, _ in model.named_modules() if name == ending or name.endswith(f".{ending}")]
        if not names:
            raise InputError(
                f"--lora_config: modules_to_save: no module of this {type(model).__name__} ends in {ending}"
            )
        if any(uses[parameter] > 1 for name in names for parameter in model.get_submodule(name).parameters()):
            raise InputError(f"--lora_config: modules_to_save: another module has the weight of {ending}: take it out")
        found += names
    return found


def _linear_routers(model: nn.Module) -> list[str]:
    """Name the linear layers that choose experts and return more than a tensor (Phi-MoE, Llama 4): peft adds to one."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, module in linear if type(module).__name__.endswith("Router")]


def outside_the_backbone(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that are not in ``base_model`` of transformers, or in the ``features`` of our networks."""
    backbone = model.base_model if isinstance(model, PreTrainedModel) else model.get_submodule("features")
    inside = set(backbone.parameters())
    return {parameter for parameter in model.parameters() if parameter not in inside}


def copied_modules(model: PreTrainedModel, task_type: str | None) -> list[str]:
    """Name the modules of which peft is to train and save a copy: those with new weights, and the head.

    peft goes by endings of names, so what happens to end alike is among them. Raises ``InputError`` where a new weight
    is in no module but the model itself.
    """
    new, head = new_weights(model), outside_the_backbone(model)
    if new is None:  # from scratch: nothing was in a file, and the head trains with the adapters
        new = head if task_type != "CAUSAL_LM" else set()
    elif task_type is None:
        new |= head
    if own := [name for name, one in model.named_parameters(recurse=False) if one in new]:
        raise InputError(
            f"--lora: the files of the model hold no {own[0]}, and peft cannot save it with adapters: train without "
            "--lora"
        )
    endings = (*_covering(model, new), *ALWAYS_COPIED[task_type])
    found: list[str] = []
    for name, _ in model.named_modules() if endings else ():
        if name.endswith(endings) and not any(name.startswith(f"{above}.") for above in found):
            found.append(name)
    return found


def _covering(module: nn.Module, new: set[nn.Parameter], prefix: str = "") -> Iterator[str]:
    """Name the largest modules in ``module`` all of whose weights are ``new``, or some of their own."""
    for name, child in module.named_children():
        inside, own = set(child.parameters()), set(child.parameters(recurse=False))
        if inside & new and (own & new or inside <= new) and not isinstance(child, CONTAINERS):
            yield prefix + name
        elif inside & new:
            yield from _covering(child, new, f"{prefix}{name}.")


def load_adapters(model: PreTrainedModel, folder: str | Path, *, task_type: str | None, source: str) -> "PeftModel":
    """Give ``model`` the LoRA adapters of ``folder``, in place, and freeze everything else.

    The adapters train, also for predictions: torch rounds a product otherwise where its weight is frozen. A model on
    the meta device gets adapters of their shapes, and none are read.

    Raises:
        InputError: they are of another kind or for another task, are no safetensors, or do not fit the model.
    """
    with packages_of("text", "adapters"):
        from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

        from memsave_recipes.models.pretrained import LOADING_ERRORS, check_base

    if not Path(folder, ADAPTER_WEIGHTS).is_file():
        raise InputError(f"{source} holds no {ADAPTER_WEIGHTS}, and other files are not read: save them with peft")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as in add_lora
            warnings.filterwarnings("error", "Found missing adapter keys")
            config = PeftConfig.from_pretrained(str(folder))
            if not isinstance(config, LoraConfig) or config.task_type != task_type:
                found = f"{getattr(config.peft_type, 'value', 'unknown')} adapters for {config.task_type or OF_IMAGES}"
                raise InputError(f"{source} holds {found}, not LORA adapters for {task_type or OF_IMAGES}: take others")
            config.inference_mode = False
            is_float16 = next(model.parameters()).dtype == torch.float16  # whose adapters were trained in float32
            if next(model.parameters()).is_meta:
                return get_peft_model(model, config, autocast_adapter_dtype=False)
            check_base(folder)
            adapted = PeftModel.from_pretrained(
                model, str(folder), config=config, is_trainable=True, autocast_adapter_dtype=is_float16
            )
            _check_all_taken(adapted, Path(folder, ADAPTER_WEIGHTS))
            return adapted
    except InputError:
        raise
    except (*LOADING_ERRORS, UserWarning) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{source}: its adapters do not fit {type(model).__name__} ({why[:200]})") from error


def _check_all_taken(model: nn.Module, path: Path) -> None:
    """Raise ``ValueError`` where a file holds more adapters than ``model`` has taken, which peft passes over.

    Numbers are counted, as peft may have renamed and joined tensors.
    """
    taken = sum(one.numel() for name, one in model.named_parameters(remove_duplicate=False) if ".lora_" in name)
    with safe_open(path, "pt") as file:
        names = [name for name in file.offset_keys() if ".lora_" in name]
        sizes = {name: prod(file.get_slice(name).get_shape()) for name in names}
    if sum(sizes.values()) > taken:
        own = {name.replace(".default", "") for name in model.state_dict()}
        raise ValueError(f"more adapters than it has layers for: {first_of(sorted({*sizes} - own), 1)}")


def without_adapters(model: nn.Module) -> str | None:
    """Return a line on experts that are one parameter, which peft finds in some mixtures alone."""
    adapted, total = {id(weight) for weight in _adapted_weights(model).values()}, 0
    left: dict[str, int] = {}
    for owner in model.modules():
        for name, one in owner.named_parameters(recurse=False):
            total += one.numel()
            if one.ndim == 3 and not one.requires_grad and id(one) not in adapted and not isinstance(owner, CONVS):
                left[f"{type(owner).__name__}.{name}"] = left.get(f"{type(owner).__name__}.{name}", 0) + one.numel()
    share = sum(left.values()) / max(1, total)
    if not adapted or share < 0.01:
        return None
    return f"note: {share:.0%} of the weights are experts without adapters, which stay frozen: {', '.join(left)}"


def _adapted_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights with adapters, by the names of these; of mixtures one of several parameters of a module."""
    found = ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
    return {name: getattr(one.get_base_layer(), getattr(one, "parameter_name", "weight")) for name, one in found}


def names_in_random_base(model: Any) -> dict[str, str]:
    """Name the tensors of a base from scratch, which is in no files, by their names in peft's ``model``; else none."""
    if not hasattr(model, "peft_config") or model.peft_config[model.active_adapter].base_model_name_or_path:
        return {}
    own = [name for name in model.state_dict() if not re.search(r"\.(lora_\w+|modules_to_save)\.", name)]
    prefix = "base_model.model."
    return {name: re.sub(r"\.(base_layer|original_module)(?=\.)", "", name).removeprefix(prefix) for name in own}
