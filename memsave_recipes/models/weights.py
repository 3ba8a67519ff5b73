"""Load a weight file into a model: safetensors, or a ``.pth`` read with ``weights_only``; no pickle is executed."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from memsave_recipes.errors import InputError

_OLD_DENSENET_KEY = re.compile(
    r"(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$"
)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the tensors of ``path`` into ``model``; all names and shapes must agree.

    Reads ``.safetensors`` and what ``torch.save(model.state_dict())`` wrote, torchvision's published files among them.

    Raises:
        InputError: no such file, not a file of tensors, or other names or shapes than the model's.
    """
    weights = {_OLD_DENSENET_KEY.sub(r"\1\2", name): tensor for name, tensor in _read(Path(path)).items()}
    expected = model.state_dict()
    # Files older than torch 0.4.1 do not know num_batches_tracked.
    missing = [name for name in expected if name not in weights and not name.endswith("num_batches_tracked")]
    unknown = [name for name in weights if name not in expected]
    other_shape = [name for name in weights if name in expected and weights[name].shape != expected[name].shape]
    for problem, names in (("lacks", missing), ("has unknown", unknown), ("has another shape for", other_shape)):
        if names:
            raise InputError(f"--weights {path} {problem} {names[0]} ({_detail(names, weights, expected)}): {_ADVICE}")
    model.load_state_dict(weights, strict=False)


_ADVICE = "give the file of this very model with this number of classes"


def _detail(names: list[str], weights: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    name = names[0]
    shapes = ""
    if name in weights and name in expected:
        shapes = f"{tuple(weights[name].shape)} in the file, {tuple(expected[name].shape)} in the model; "
    return f"{shapes}{len(names)} such in all"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # bytes that are no such file raise anything, KeyError and IndexError included
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"--weights {path} cannot be read as a file of tensors: {reason}") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise InputError(f"--weights {path} holds no state dict: save model.state_dict()")
    return weights
