"""VGG and DenseNet with torchvision's parameter names and shapes, and the ``config.json`` of saved ones.

VGG: Simonyan & Zisserman 2014, https://arxiv.org/abs/1409.1556; DenseNet-BC: Huang et al. 2016,
https://arxiv.org/abs/1608.06993. ``vgg_small`` and ``densenet_small`` are ours, small enough for a CPU.
``--activation_checkpointing bottleneck`` is torchvision's ``memory_efficient``, and counts BatchNorm once.

Keys of the ``config.json`` are those of timm (``architecture``, ``num_classes``) and transformers (``id2label``,
``image_size``, ``dtype``, ``problem_type``).
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memsave_recipes.core.text import read_json, sanitized
from memsave_recipes.models.labels import SINGLE, ProblemType

POOL = "pool"
CONVOLUTIONS: dict[str, list[int | str]] = {
    "small": [*[16] * 4, POOL, *[32] * 4, POOL, *[64] * 4, POOL],
    "11": [64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL],
    "13": [64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL],
    "16": [64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL],
    "19": [64, 64, POOL, 128, 128, POOL, *[256] * 4, POOL, *[512] * 4, POOL, *[512] * 4, POOL],
}
BOTTLENECK_WIDTH = 4  # channels between the two convolutions of a dense layer, in growth rates
SIZES: dict[str, tuple[int, int, tuple[int, ...]]] = {  # growth rate, channels of the stem, layers of each dense block
    "densenet_small": (12, 24, (4, 4, 4)),
    "densenet121": (32, 64, (6, 12, 24, 16)),
    "densenet169": (32, 64, (6, 12, 32, 32)),
    "densenet201": (32, 64, (6, 12, 48, 32)),
}


class VGG(nn.Module):
    """Stacked 3x3 convolutions, then three linear layers.

    Args:
        pooled_size: side of the map that the classifier sees, whatever the image size.
        hidden_size: width of the two hidden linear layers.
    """

    activation_stacks: ClassVar = ("features",)

    def __init__(
        self,
        features: nn.Sequential,
        *,
        num_classes: int = 1000,
        dropout: float = 0.5,
        out_channels: int = 512,
        pooled_size: int = 7,
        hidden_size: int = 4096,
    ) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(pooled_size)
        self.classifier = nn.Sequential(
            nn.Linear(out_channels * pooled_size**2, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, num_classes),
        )
        self.apply(_initialize_vgg)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, num_classes)."""
        maps = self.avgpool(self.features(images))  # (B, C, 7, 7)
        logits: Tensor = self.classifier(torch.flatten(maps, 1))
        return logits


def build_vgg(name: str, *, num_classes: int = 1000) -> VGG:
    """Build ``vgg11``, ``vgg13``, ``vgg16``, ``vgg19``, each also as ``..._bn``, or ``vgg_small``."""
    depth = name.removeprefix("vgg").removeprefix("_").removesuffix("_bn")
    features = convolutions(CONVOLUTIONS[depth], batch_norm=name.endswith("_bn"))
    if depth == "small":
        return VGG(features, num_classes=num_classes, out_channels=64, pooled_size=4, hidden_size=128, dropout=0.2)
    return VGG(features, num_classes=num_classes)


def convolutions(widths: list[int | str], *, batch_norm: bool) -> nn.Sequential:
    """Make the features of a VGG whose convolutions have these output channels, as in ``CONVOLUTIONS``."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            continue
        layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU(inplace=True))
        channels = width
    return nn.Sequential(*layers)


def _initialize_vgg(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class DenseLayer(nn.Module):
    """Makes ``growth_rate`` new channels from all feature maps so far."""

    def __init__(self, in_channels: int, growth_rate: int) -> None:
        super().__init__()
        width = BOTTLENECK_WIDTH * growth_rate
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, growth_rate, kernel_size=3, padding=1, bias=False)

    def bottleneck(self, features: list[Tensor]) -> Tensor:
        """Concatenate, normalise and squeeze to (B, 4 * growth_rate, H, W): the half that takes the memory."""
        squeezed: Tensor = self.conv1(self.relu1(self.normalized(features)))
        return squeezed

    def normalized(self, features: list[Tensor]) -> Tensor:
        """Normalise all feature maps in one tensor, (B, in_channels, H, W)."""
        normalized: Tensor = self.norm1(torch.cat(features, dim=1))
        return normalized

    def forward(self, features: list[Tensor]) -> Tensor:
        """Map feature maps, each (B, c_i, H, W), to one of (B, growth_rate, H, W)."""
        added: Tensor = self.conv2(self.relu2(self.norm2(self.bottleneck(features))))
        return added


class DenseBlock(nn.ModuleDict):
    """Layers that each see the outputs of all before them."""

    def __init__(self, num_layers: int, in_channels: int, growth_rate: int) -> None:
        layers = {
            f"denselayer{i + 1}": DenseLayer(in_channels + i * growth_rate, growth_rate) for i in range(num_layers)
        }
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C + num_layers * growth_rate, H, W)."""
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """A strided stem, dense blocks with halving transitions between them, and a linear classifier."""

    activation_stacks: ClassVar = ("features",)

    def __init__(
        self, growth_rate: int, stem_channels: int, layers_per_block: tuple[int, ...], *, num_classes: int = 1000
    ) -> None:
        super().__init__()
        channels = stem_channels
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(channels),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        )
        for i, num_layers in enumerate(layers_per_block, start=1):
            self.features.add_module(f"denseblock{i}", DenseBlock(num_layers, channels, growth_rate))
            channels += num_layers * growth_rate
            if i < len(layers_per_block):
                self.features.add_module(f"transition{i}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)
        self.apply(_initialize_densenet)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, num_classes)."""
        maps = F.relu(self.features(images), inplace=True)  # (B, C, H / 32, W / 32)
        logits: Tensor = self.classifier(torch.flatten(F.adaptive_avg_pool2d(maps, 1), 1))
        return logits


def build_densenet(name: str, *, num_classes: int = 1000) -> DenseNet:
    """Build ``densenet121``, ``densenet169``, ``densenet201`` or ``densenet_small``."""
    return DenseNet(*SIZES[name], num_classes=num_classes)


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(kernel_size=2, stride=2),
        )
    )


def _initialize_densenet(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig:
    """What ``MODELS[architecture]`` was trained for; ``image_size`` is in pixels, ``dtype`` that of the parameters."""

    architecture: str
    label_names: tuple[str, ...]
    image_size: int
    dtype: torch.dtype
    problem_type: ProblemType = SINGLE

    def save(self, folder: Path) -> None:
        """Write ``config.json`` into ``folder``."""
        content = {
            "architecture": self.architecture,
            "num_classes": len(self.label_names),
            "id2label": dict(enumerate(self.label_names)),
            "image_size": self.image_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "problem_type": self.problem_type,
        }
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "ConvnetConfig | None":
        """Read the folder that ``save`` has written; ``None`` for another one."""
        try:
            content = sanitized(read_json(Path(folder, CONFIG).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # the Hub's names are no folders; damaged files are told by their loaders
            return None
        match content:
            case {"architecture": str(name), "id2label": dict(names), "image_size": int(size), "dtype": str(dtype)}:
                kind = getattr(torch, dtype, None)
                label_names = tuple(str(names.get(str(index))) for index in range(len(names)))
                problem: Any = content.get("problem_type", SINGLE)
                if isinstance(kind, torch.dtype) and kind.is_floating_point and problem in get_args(ProblemType):
                    of_labels = {"label_names": label_names, "problem_type": problem}
                    return cls(architecture=name, image_size=size, dtype=kind, **of_labels)
        return None
