"""Networks with BatchNorm in float64, small and of published sizes, that multiply rounding as little as they can."""

from functools import partial

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from memsave_recipes.models.convnets import build_densenet, build_vgg


def _resnet(**sizes):
    return ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes))


MODELS = {
    "vgg_small_bn": partial(build_vgg, "vgg_small_bn", num_classes=10),
    "densenet_small": partial(build_densenet, "densenet_small", num_classes=10),
    "resnet_small": partial(_resnet, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]),
    "vgg16_bn": partial(build_vgg, "vgg16_bn", num_classes=10),
    "densenet121": partial(build_densenet, "densenet121", num_classes=10),
    "resnet50": _resnet,
}


def build(name):
    """In float64, without dropout, and no vector of it zeros or ones, as training has it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "vgg16_bn":
        model.classifier = nn.Linear(512 * 7 * 7, 10)  # of 120 million weights none is normalised
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, ResNetBottleNeckLayer):  # begins near the identity: https://arxiv.org/abs/1706.02677, 5.1
            nn.init.zeros_(module.layer[-1].normalization.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * (parameter.dim() == 1)
    return model.double().train()
