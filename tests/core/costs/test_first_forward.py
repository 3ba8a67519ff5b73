"""A model that is looked at before its first forward is as it was: what that forward installs is taken back."""

from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from samples import every_third
from torch import nn
from torch.nn.utils import parametrize
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import memsave_recipes as memsave
from memsave_recipes.integrations.trainer_callback import MemsaveCallback

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama():
    tokens = torch.arange(16)[None] % 50
    return LlamaForCausalLM(LlamaConfig(**TEXT)), {"input_ids": tokens, "labels": tokens, "output_hidden_states": True}


def llava(layer):
    tower = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = LlavaConfig(
        vision_config=tower, text_config=LlamaConfig(**TEXT), image_token_id=60, vision_feature_layer=layer
    )
    tokens = torch.tensor([[1, 60, 60, 60, 60, 2, 3, 4]])
    batch = {"input_ids": tokens, "labels": tokens, "pixel_values": torch.linspace(-1, 1, 192).view(1, 3, 8, 8)}
    return LlavaForConditionalGeneration(config), batch


class Installing(nn.Module):
    """Installs something in its first forward, by ``install``; whether it has done so is kept by ``mark``."""

    kinds, installed = set(), False

    def __init__(self, install, mark):
        super().__init__()
        self.install, self.mark, self.config = install, mark, SimpleNamespace(installed=False, seen=[])
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.register_buffer("late", None)
        self.state, self.cache, self.handles = ([], False), {}, []

    def is_marked(self):
        marks = {"config": self.config.installed, "class": type(self).installed, "tuple": bool(self.state[0])}
        return marks.get(self.mark, vars(self).get("installed", False))

    def forward(self, x, **_):
        if not self.is_marked():
            self.install(self)
            {"config": self.config, "class": type(self)}.get(self.mark, self).installed = True
            self.state[0].append(1)
        for layer in self.layers:
            x = layer(x)
        for extra in (self.late, self.cache.get("scale"), getattr(self, "scale", None)):
            x = x if extra is None else x * extra
        x = self.extra(x) if hasattr(self, "extra") else x
        return {"loss": self.after(x).square().mean(), "x": x}

    def after(self, x):
        return x


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(parameter):
    parameter.grad.mul_(2)


def hooks(model):
    model.handles.append(model.layers[0].register_forward_hook(lambda module, args, output: 2 * output))
    model.layers[1].register_forward_pre_hook(lambda module, args: 2 * args[0])
    model.layers[2].register_full_backward_hook(lambda module, inner, outer: tuple(2 * one for one in inner))
    model.layers[0][0].weight.register_hook(lambda gradient: 3 * gradient)
    model.layers[0][0].bias.register_post_accumulate_grad_hook(doubled)


def modules(model):
    model.extra = nn.Linear(8, 8)
    model.layers[0][1] = nn.Sigmoid()
    model.layers.append(nn.Linear(8, 8))


def tensors(model):
    model.late, model.scale = torch.full((), 2.0), nn.Parameter(torch.full((), 3.0))
    model.register_buffer("seen", torch.ones(1))
    model.cache["scale"] = torch.full((), 2.0)
    model.layers[2][0].weight.data.mul_(2)
    model.layers[1][0].bias.requires_grad_(False)
    model.config.seen.append(1)


def classes(model):
    model.layers[0][0].__class__ = Doubled
    parametrize.register_parametrization(model.layers[1][0], "weight", nn.Tanh())


def wrappers(model):
    forward, model.after = model.forward, lambda x: 2 * x
    model.forward = lambda *args, **kwargs: {"loss": 2 * forward(*args, **kwargs)["loss"]}
    model.layers[0][0].forward = lambda x, linear=model.layers[0][0]: 2 * nn.functional.linear(x, linear.weight)


HUGGING_FACE = {
    "Llama": llama,
    "LLaVA's layer 3": lambda: llava(3),
    "LLaVA's layer -2": lambda: llava(-2),
    "LLaVA's layers -2 and -1": lambda: llava([-2, -1]),
}
CASES = HUGGING_FACE | {
    f"{install.__name__}, marked by {mark}": lambda install=install, mark=mark: (
        Installing(install, mark),
        {"x": torch.linspace(-1, 1, 16).view(2, 8)},
    )
    for install in (hooks, modules, tensors, classes, wrappers)
    for mark in ("attribute", "config", "class", "tuple")
    if install is hooks or mark == "attribute"
}


def loss_of(output):
    return output["loss"]


def step(model, batch):
    loss = loss_of(model(**batch))
    loss.backward()
    return loss


def planned(strategy, model, batch):
    memsave.make_plan(model, batch, strategy=strategy, budget_gib=1, loss_fn=loss_of)


def prepared(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    memsave.prepare(model, batch, optimizer, strategy="full", loss_fn=loss_of).remove()


def verified(model, batch):
    memsave.verify(model, memsave.make_plan(model, strategy="full"), lambda: step(model, batch))


def trained(model, batch):
    """The plan is made in the first step, which changes nothing else."""
    arguments = TrainingArguments(output_dir="unused", report_to=[], max_steps=1, learning_rate=0.0, use_cpu=True)
    callback = MemsaveCallback(strategy="full")
    Trainer(model, arguments, train_dataset=[batch], data_collator=itemgetter(0), callbacks=[callback]).train()
    model.zero_grad()


LOOKS = {
    "none": partial(planned, "none"),
    "full": partial(planned, "full"),
    "budget": partial(planned, "budget:bitwise"),
    "prepare": prepared,
    "verify": verified,
    "Trainer": trained,
}


def results(make, look=lambda model, batch: None):
    """Of two steps, after the model was looked at."""
    torch.manual_seed(0)
    Installing.installed = False
    model, batch = make()
    look(model.train(), batch)
    found = []
    for _ in range(2):
        output = model(**batch)
        output["loss"].backward()
        found += [output["loss"].detach(), torch.tensor(len(output.get("hidden_states") or ()))]
    return found + list(model.state_dict().values()) + [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("case", "look"),
    every_third((case, look) for look in LOOKS for case in (HUGGING_FACE if look == "Trainer" else CASES)),
)
def test_a_model_that_was_looked_at_trains_as_plain(case, look, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, looked = results(CASES[case]), results(CASES[case], LOOKS[look])
    assert all(one is other or torch.equal(one, other) for one, other in zip(plain, looked, strict=True))
