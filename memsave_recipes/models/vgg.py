"""VGG (Simonyan & Zisserman 2014, https://arxiv.org/abs/1409.1556), with torchvision's parameter names.

``state_dict`` keys and shapes are those of ``torchvision.models.vgg``, so its weight files load. ``vgg_small`` is ours:
the same shape of network, narrow enough for a CPU.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

POOL = "pool"
CONVOLUTIONS: dict[str, list[int | str]] = {
    "small": [*[16] * 4, POOL, *[32] * 4, POOL, *[64] * 4, POOL],
    "11": [64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL],
    "13": [64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL],
    "16": [64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL],
    "19": [64, 64, POOL, 128, 128, POOL, *[256] * 4, POOL, *[512] * 4, POOL, *[512] * 4, POOL],
}


class VGG(nn.Module):
    """Stacked 3x3 convolutions, then three linear layers.

    Args:
        features: the convolutions, giving ``out_channels`` maps.
        out_channels: channels of the last convolution.
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
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, num_classes)."""
        maps = self.avgpool(self.features(images))  # (B, C, 7, 7)
        return self.classifier(torch.flatten(maps, 1))


def build_vgg(name: str, *, num_classes: int = 1000) -> VGG:
    """A VGG by its name: ``vgg11``, ``vgg13``, ``vgg16``, ``vgg19``, each also as ``..._bn``, or ``vgg_small``."""
    depth = name.removeprefix("vgg").removeprefix("_").removesuffix("_bn")
    features = _convolutions(CONVOLUTIONS[depth], batch_norm=name.endswith("_bn"))
    if depth == "small":
        return VGG(features, num_classes=num_classes, out_channels=64, pooled_size=4, hidden_size=128, dropout=0.2)
    return VGG(features, num_classes=num_classes)


def _convolutions(widths: list[int | str], *, batch_norm: bool) -> nn.Sequential:
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


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
