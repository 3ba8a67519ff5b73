"""What trains: the head, adapters of images; BatchNorm that is frozen; plans of what is frozen."""

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    ResNetConfig,
    ViTConfig,
)
from workloads import workload_of
from zoo.batches import IMAGES
from zoo.heads import base_without_head, changed, load, logits

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span, plan_for
from memsave_recipes.core.plans.simulate import simulate, timeline
from memsave_recipes.models.adapters import load_adapters, outside_the_backbone
from memsave_recipes.models.image_classifiers import MODELS, train_part_of_images
from memsave_recipes.models.what_trains import ClassifierTrainingArguments, TrainedPartArguments, train_part
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm

LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def vit():
    return AutoModelForImageClassification.from_config(ViTConfig(image_size=16, patch_size=8, num_labels=3, **LAYERS))


def resnet():
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    return AutoModelForImageClassification.from_config(ResNetConfig(num_labels=3, **shape))


def bert():
    return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=32, num_labels=3, **LAYERS))


def freeze(model, task_type=None, **flags):
    train_part(model.train(), ClassifierTrainingArguments(**flags), task_type=task_type)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_last(model, count):
    """Freeze all but the last blocks that have weights, and the head."""
    head = outside_the_backbone(model)
    blocks = [block for stack in find_stacks(model) for block in stack.blocks]
    weights = [{p for module in block.modules for p in module.parameters()} - head for block in blocks]
    trained = head.union(*[own for own in weights if own][-count:])
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


@pytest.mark.parametrize(
    ("make", "head"),
    [(vit, {"classifier"}), (resnet, {"classifier.1"}), (bert, {"classifier"})],
)
def test_of_a_frozen_backbone_the_head_alone_trains(make, head):
    trained = freeze(make(), freeze_backbone=True)
    assert {name.rpartition(".")[0] for name in trained} == head


def test_of_our_networks_all_linear_layers_train():
    assert {name.partition(".")[0] for name in freeze(MODELS["vgg_small"](num_classes=3), freeze_backbone=True)} == {
        "classifier"
    }


def test_what_the_files_did_not_hold_trains_with_the_head(tmp_path):
    base_without_head("bert", tmp_path)
    model = load(tmp_path, seed=1)
    model.bert.pooler.dense.weight._is_hf_initialized = False  # as where the files hold none
    assert "bert.pooler.dense.weight" in freeze(model, freeze_backbone=True)


def test_contradictions():
    with pytest.raises(InputError, match="--freeze_backbone trains the head"):
        ClassifierTrainingArguments(freeze_backbone=True, lora=True)


@pytest.mark.parametrize("flags", [{"freeze_backbone": True}, {"lora": True, "lora_rank": 2}])
def test_statistics_of_frozen_batchnorm_do_not_move(flags):
    model = resnet()
    freeze(model, **flags)
    model.eval()
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = 3 + torch.randn(4, 3, 32, 32)
    in_training = model(images).logits
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    torch.testing.assert_close(in_training, model.eval()(images).logits)
    with pytest.raises(InputError, match="no BatchNorm layers that train"):
        global_batchnorm(model.train())


@pytest.mark.parametrize(("make", "kind"), [(vit, "Linear"), (resnet, "Conv2d")])
def test_adapters_of_images(make, kind):
    model = make()
    freeze(model, lora=True, lora_rank=2)
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert {type(module).__name__ for module in adapted} == {kind}
    assert not any("lora" in name for name, _ in model.classifier.named_modules())


@pytest.mark.parametrize("kind", ["vit", "resnet", "levit"])
@pytest.mark.parametrize("more", [{}, {"use_dora": True, "use_rslora": True}], ids=["plain", "DoRA"])
def test_adapters_of_images_come_back(kind, more, tmp_path):
    base_without_head(kind, tmp_path / "base", IMAGES)
    model = load(tmp_path / "base", 1, auto_class=IMAGES)
    adapted = changed(
        train_part(model, TrainedPartArguments(lora=True, lora_rank=2, lora_entries=more), task_type=None)
    )
    adapted.save_pretrained(tmp_path / "final")
    expected = logits(adapted, kind, IMAGES)
    base = load(tmp_path / "base", 2, auto_class=IMAGES)
    again = load_adapters(base, tmp_path / "final", task_type=None, source="final")
    other = load(tmp_path / "base", 3, auto_class=IMAGES)
    by_peft = PeftModel.from_pretrained(other, tmp_path / "final", is_trainable=True)
    for one in (again, by_peft):
        torch.testing.assert_close(logits(one, kind, IMAGES), expected, rtol=0, atol=1e-7)


def test_modules_to_save():
    entries = {"modules_to_save": ["layernorm"]}
    assert "vit.layernorm.modules_to_save.default.weight" in freeze(vit(), lora=True, lora_entries=entries)
    with pytest.raises(InputError, match=r"modules_to_save: no module of this .* ends in norms"):
        freeze(vit(), lora=True, lora_entries={"modules_to_save": ["norms"]})
    tied = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="modules_to_save: another module has the weight of wte"):
        freeze(tied, "CAUSAL_LM", lora=True, lora_entries={"modules_to_save": ["wte"]})


def test_a_model_that_reads_what_adapters_lack_is_refused():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3))
            self.classifier = nn.Linear(4, 2)

        def forward(self, images):
            stride = self.features[0].stride[0]
            return self.classifier(self.features(images)[:, :, ::stride].mean((2, 3)))

    with pytest.raises(InputError, match="--lora: Reads reads what peft's layers lack"):
        train_part_of_images(Reads(), ClassifierTrainingArguments(lora=True), 8)


def one_span(model, action=Action.RECOMPUTE):
    """All blocks of the only stack together."""
    (names,) = block_names(find_stacks(model))
    return Plan(strategy="one", blocks=tuple(names), spans=(Span(start=0, stop=len(names), action=action),))


def runs_of(model, plan, batch):
    """How often each convolution runs in a step under a plan."""
    counts = {}

    def count(name):
        return lambda *_: counts.update({name: counts.get(name, 0) + 1})

    named = {name: one for name, one in model.named_modules() if isinstance(one, nn.Conv2d)}
    hooks = [one.register_forward_hook(count(name)) for name, one in named.items()]
    with apply_plan(model, plan):
        model(batch).sum().backward()
    for hook in hooks:
        hook.remove()
    return [counts[name] for name in named]


@pytest.mark.parametrize("action", [Action.RECOMPUTE, Action.RECOMPUTE_NESTED])
def test_frozen_blocks_are_not_run_again(action):
    model = MODELS["vgg_small"](num_classes=3)
    train_last(model, 2)
    *frozen, trained, _ = runs_of(model, one_span(model, action), torch.randn(2, 3, 32, 32))
    assert set(frozen) == {1}
    assert trained > 1


@pytest.mark.parametrize(("make", "size"), [(lambda: MODELS["vgg_small"](num_classes=3), 32), (vit, 16)])
@pytest.mark.parametrize("strategy", ["full", "segments:2"])
def test_for_frozen_blocks_no_state_of_the_generator_is_kept(monkeypatch, make, size, strategy):
    model, read, states = make(), torch.get_rng_state, []
    freeze(model, freeze_backbone=True)
    monkeypatch.setattr(torch, "get_rng_state", lambda: states.append(read()) or states[-1])
    with apply_plan(model, plan_blocks(model, strategy)):
        output = model(torch.randn(2, 3, size, size))
    assert getattr(output, "logits", output).requires_grad
    assert states == []


def test_layers_that_the_model_calls_are_not_run_again_where_they_are_frozen():
    model = vit()
    train_last(model, 1)
    runs = []
    for number, layer in enumerate(model.vit.layers):
        layer.layernorm_before.register_forward_hook(lambda *_, number=number: runs.append(number))
    with apply_plan(model, one_span(model)):
        model(torch.randn(2, 3, 16, 16)).logits.sum().backward()
    assert runs == [0, 1, 2, 2]


def test_a_span_over_frozen_blocks_costs_what_those_behind_them_cost():
    """By hand: of the second run the blocks that train alone; of the first one nothing is saved."""
    model = MODELS["vgg_small"](num_classes=3)
    train_last(model, 2)
    workload = workload_of(model, lambda model, batch: model(batch).sum(), torch.randn(2, 3, 32, 32))
    plans = [plan_for("none", workload.stacks)]
    chain = measure(workload, plans, instruments=DeviceInstruments(torch.device("cpu"), repetitions=1)).chain()
    blocks = [chain.blocks[position] for position in chain.decided]
    num_frozen = sum(not block.has_backward for block in blocks)
    assert 0 < num_frozen < len(blocks)
    keeps = [block.option(Action.KEEP) for block in blocks]
    assert all(keep.saved_bytes == 0 and not keep.saves_input for keep in keeps[:num_frozen])
    plan = one_span(model)
    assert simulate(chain, plan).added_s == pytest.approx(sum(block.forward_s for block in blocks[num_frozen:]))
    behind = {point.block for point in timeline(chain, plan) if point.phase in ("backward", "recomputation")}
    assert not behind & {block.name for block in blocks[:num_frozen]}


@pytest.mark.parametrize("flags", [{"lora": True}, {"freeze_backbone": True}], ids=str)
def test_what_trains_beside_frozen_weights_in_float16_is_float32(flags):
    model = bert().half()
    trained = freeze(model, "SEQ_CLS", **flags)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.float16), name


def test_adapters_for_weights_in_float16_come_back_with_every_bit(tmp_path):
    base_without_head("vit", tmp_path / "base", IMAGES)
    model = load(tmp_path / "base", 1, auto_class=IMAGES).half()
    adapted = changed(train_part(model, TrainedPartArguments(lora=True, lora_rank=2), task_type=None))
    adapted.save_pretrained(tmp_path / "final")
    base = load(tmp_path / "base", 2, auto_class=IMAGES).half()
    again = load_adapters(base, tmp_path / "final", task_type=None, source="final")
    saved, loaded = (
        {name: one for name, one in each.named_parameters() if "lora_" in name} for each in (adapted, again)
    )
    assert any(not torch.equal(one, one.half().float()) for one in saved.values())
    assert all(torch.equal(loaded[name], one) for name, one in saved.items())
