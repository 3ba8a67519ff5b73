"""Adapters of a model whose files lacked something: what is new trains whole, is saved and comes back."""

import pytest
import torch
from peft import PeftModel
from samples import every_third
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from zoo.heads import CLASSIFIER, LORA, NOT_BUILT, base_without_head, changed, load, logits
from zoo.tiny import tiny_config

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.adapters import add_lora, copied_modules, load_adapters
from memsave_recipes.models.pretrained import TransformerArguments, build_text_classifier
from memsave_recipes.models.slices import new_weights

LANGUAGE = "CAUSAL_LM"
ALL_TYPES = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
NOT_ADAPTED = {"ibert"}
"""Its linear layers are of a class of its own, which peft does not adapt."""
NOT_REPEATABLE = {"jamba", "zamba", "zamba2"}
"""On an AMD EPYC (Zen 3) their sums rounded otherwise from one copy of the model to the next."""


def base_with_another_head(kind, folder):
    AutoModelForMaskedLM.from_config(tiny_config(kind)).save_pretrained(folder)  # without a pooler


def base_for_other_classes(kind, folder):
    config = tiny_config(kind)
    config.num_labels = 5
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def base_of_answers(kind, folder):
    AutoModelForQuestionAnswering.from_config(tiny_config(kind)).save_pretrained(folder)


def base_that_writes(kind, folder):
    AutoModelForSeq2SeqLM.from_config(tiny_config(kind)).save_pretrained(folder)


def base_without_a_layer(kind, folder):
    config = tiny_config(kind)
    config.num_hidden_layers -= 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_config(kind).save_pretrained(folder)


def base_in_pieces(kind, folder):
    whole = AutoModelForSequenceClassification.from_config(tiny_config(kind))
    getattr(whole, whole.base_model_prefix).save_pretrained(folder, max_shard_size="20KB")


@pytest.mark.parametrize(
    ("kind", "save"),
    every_third(
        [
            *(
                (kind, base_without_head)
                for kind in ("bart", "xlnet", "bert", "gpt2", "jamba", "longformer", "zamba", "phimoe")
            ),
            *((kind, base_with_another_head) for kind in ("bert", "distilbert", "modernbert", "roberta")),
            *((kind, base_for_other_classes) for kind in ("bart", "distilbert", "bert", "electra", "xlm", "t5")),
            *((kind, base_of_answers) for kind in ("deberta-v2", "xlnet")),
            *((kind, base_that_writes) for kind in ("mbart", "t5")),
            *((kind, base_without_a_layer) for kind in ("bert", "roberta")),
            *((kind, base_in_pieces) for kind in ("modernbert", "flaubert")),
        ]
    ),
)
def test_what_the_base_lacks_trains_is_saved_and_comes_back(kind, save, tmp_path):
    save(kind, tmp_path / "base")
    assert_all_comes_back(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in sorted(ALL_TYPES) if kind not in {*NOT_BUILT, *NOT_ADAPTED}])
def test_every_type(kind, tmp_path):
    base_without_head(kind, tmp_path / "base")
    assert_all_comes_back(kind, tmp_path)


def assert_all_comes_back(kind, tmp_path):
    model = load(tmp_path / "base", seed=1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    new = {names[parameter] for parameter in new_weights(model)}
    assert new
    adapted = changed(add_lora(model, LORA, task_type=CLASSIFIER))
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.replace(".modules_to_save.default", "") for name in trains} >= new
    adapted.save_pretrained(tmp_path / "final")
    expected = logits(adapted, kind)
    again = load_adapters(load(tmp_path / "base", seed=2), tmp_path / "final", task_type=CLASSIFIER, source="final")
    by_peft = PeftModel.from_pretrained(load(tmp_path / "base", seed=3), tmp_path / "final", is_trainable=True)
    rounding = 1e-7 if kind in NOT_REPEATABLE else 0.0
    for found in (again, by_peft):
        torch.testing.assert_close(logits(found, kind), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("kind", ["bert", "bart", "distilbert"])
def test_a_plan_before_the_weights_has_what_trains_then(kind, tmp_path):
    base_without_head(kind, tmp_path)
    flags = type("Flags", (TransformerArguments,), {"lora": True})(model_name_or_path=str(tmp_path))
    found = []
    for with_weights in (True, False):
        options = {"vocab_size": 50, "pad_token_id": 0, "with_weights": with_weights}
        model = build_text_classifier(flags, ("a", "b", "c"), torch.float32, **options)
        add_lora(model, LORA, task_type=CLASSIFIER)
        found.append({name for name, parameter in model.named_parameters() if parameter.requires_grad})
    assert found[0] == found[1]


def test_of_a_language_model_whose_base_has_no_head_the_head_trains(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **shape)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert copied_modules(model, LANGUAGE) == ["lm_head"]
    adapted = add_lora(model, LORA, task_type=LANGUAGE)
    tokens = torch.arange(10)[None]
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad is not None
    assert model.lm_head.weight.requires_grad


def test_from_scratch_adapters_train_beside_the_head_alone():
    model = AutoModelForSequenceClassification.from_config(tiny_config("bart"))
    assert copied_modules(model, CLASSIFIER) == ["classification_head"]
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2"))
    assert copied_modules(model, LANGUAGE) == []


def test_a_new_weight_of_the_model_itself_is_refused(tmp_path):
    class Scaled(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            self.gain = torch.nn.Parameter(torch.ones(config.hidden_size))
            self.post_init()

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="--lora: the files of the model hold no gain"):
        add_lora(Scaled.from_pretrained(tmp_path), LORA, task_type=LANGUAGE)
