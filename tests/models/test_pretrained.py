"""Models of transformers by flags: from scratch, from a folder, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.pretrained import (
    TransformerArguments,
    build_text_classifier,
    build_transformer,
    configuration_of,
    padding_known,
)

TINY = "n_layer=2,n_head=2,n_embd=16"


@pytest.fixture
def folder(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=2, n_head=2, n_embd=16)).save_pretrained(tmp_path)
    return tmp_path


def test_from_scratch(folder):
    flags = TransformerArguments(model_type="gpt2", config_overrides=TINY, dropout=0.0, attn_implementation="eager")
    model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.bfloat16, vocab_size=77, eos_token_id=3)
    assert model.config.vocab_size == 77
    assert model.config.eos_token_id == 3
    assert (model.config.resid_pdrop, model.config.embd_pdrop, model.config.attn_pdrop) == (0, 0, 0)
    assert model.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert flags.name == "gpt2"


@pytest.mark.parametrize(
    ("model_type", "layers"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers"), ("t5", "num_decoder_layers")]
)
def test_sizes_of_no_model_are_refused_at_once(model_type, layers):
    for entry, words in ((f"{layers}={10**9}", "is more than 2000"), ("vocab_size=0", "is less than 1")):
        with pytest.raises(InputError, match=f"{entry} {words}"):
            configuration_of(TransformerArguments(model_type=model_type, config_overrides=entry))


def test_entries_that_follow_from_the_overrides_follow_them(tmp_path):
    shape = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,num_key_value_heads=1,intermediate_size=24"
    flags = TransformerArguments(model_type="qwen3", config_overrides=shape)
    model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.float32, vocab_size=64)
    assert len(model.config.layer_types) == 2
    model.save_pretrained(tmp_path)  # refuses a configuration that contradicts itself


def test_dropout_is_none_where_the_overrides_set_none():
    flags = TransformerArguments(model_type="gpt2", config_overrides=f"{TINY},attn_pdrop=0.1", dropout=0.0)
    config = configuration_of(flags)
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0, 0, 0.1)
    assert flags.vocab_size == 8192
    assert TransformerArguments(model_type="gpt2", config_overrides="n_layer=1,vocab_size=77").vocab_size == 77


def test_padding_outside_a_smaller_vocabulary_is_none():
    shape = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,intermediate_size=48"
    flags = TransformerArguments(model_type="phi3", config_overrides=shape)
    model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.float32, vocab_size=64)
    assert model.config.pad_token_id is None
    assert model.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize(("model_type", "shape"), [("deit", "hidden_size=32"), ("hiera", "embed_dim=16")])
def test_image_classifiers_of_every_kind(model_type, shape):
    """Several classes for a type, and an image size with two sides."""
    overrides = f"{shape},num_hidden_layers=1,num_attention_heads=2" if model_type == "deit" else shape
    flags = TransformerArguments(model_type=model_type, config_overrides=overrides)
    model = build_transformer(AutoModelForImageClassification, flags, dtype=torch.float32, image_size=64)
    assert type(model).__name__.endswith("ForImageClassification")


def test_entries_that_layers_have_their_own_of_can_be_overridden():
    shape = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=8"
    small = f"{shape},intermediate_size=48,vocab_size_per_layer_input=64,hidden_size_per_layer_input=8"
    flags = TransformerArguments(model_type="gemma4_text", config_overrides=small)
    model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.float32, vocab_size=64)
    assert model.config.per_layer_config[0].head_dim == 8


def test_from_a_folder_the_vocabulary_stays(folder):
    flags = TransformerArguments(model_name_or_path=str(folder), dropout=0.25)
    model = build_transformer(AutoModelForCausalLM, flags, dtype=torch.float32, vocab_size=9, eos_token_id=3)
    assert model.config.vocab_size == 64
    assert model.config.resid_pdrop == 0.25
    assert all(module.training for module in model.modules())
    weights = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_new_head_for_other_classes(folder):
    flags = TransformerArguments(model_name_or_path=str(folder))
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = build_transformer(AutoModelForSequenceClassification, flags, dtype=torch.float32, **labels)
    assert model.score.weight.shape[0] == 3


def test_code_of_its_own_is_not_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    witness = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    with pytest.raises(InputError, match="--trust_remote_code"):
        build_transformer(
            AutoModelForCausalLM, TransformerArguments(model_name_or_path=str(folder)), dtype=torch.float32
        )
    assert not witness.exists()


def test_weights_in_pickle_are_not_loaded(folder):
    weights = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        build_transformer(
            AutoModelForCausalLM, TransformerArguments(model_name_or_path=str(folder)), dtype=torch.float32
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "give one of"),
        ({"model_type": "gpt2", "model_name_or_path": "x"}, "give one of"),
        ({"model_name_or_path": "x", "config_overrides": "n_layer=1"}, "--config_overrides is for a model from"),
    ],
)
def test_contradictions(flags, message):
    with pytest.raises(InputError, match=message):
        TransformerArguments(**flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_type": "gpt2", "config_overrides": "n_legs=4"}, "gpt2 cannot be made: .*n_legs"),
        ({"model_type": "gpt2", "config_overrides": "n_layer=-1"}, "gpt2 cannot be made: n_layer=-1 is less than 1"),
        ({"model_type": "gpt2", "config_overrides": "n_head=0"}, "gpt2 cannot be made"),
        ({"model_type": "gpt9"}, "gpt9 cannot be made"),
        (
            {"model_type": "llama", "config_overrides": "hidden_size=30,num_attention_heads=4"},
            r"llama cannot be made: The hidden size \(30\) is not a multiple",
        ),
        (
            {"model_type": "modernbert-decoder", "config_overrides": "vocab_size=64"},
            "modernbert-decoder cannot be made: Field 'pad_token_id' expected int.* check .*--config_overrides",
        ),
        ({"model_type": "bert", "attn_implementation": "no_such"}, "bert cannot be made"),
        ({"model_name_or_path": "/no/such/folder"}, "/no/such/folder cannot be made"),
    ],
)
def test_models_that_cannot_be_made(flags, message):
    with pytest.raises(InputError, match=message):
        build_transformer(AutoModelForCausalLM, TransformerArguments(**flags), dtype=torch.float32)


SMALL = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=32"
CLASSIFIERS = {
    "bert": SMALL,
    "modernbert": f"{SMALL},local_attention=4",
    "mistral": f"{SMALL},num_key_value_heads=2,sliding_window=4",
    "gpt2": TINY,
}


@pytest.mark.parametrize("model_type", CLASSIFIERS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_masks_are_the_same_where_the_padding_is_known(model_type, is_padded):
    """Bit for bit, of encoders and decoders, with windows and without."""
    flags = TransformerArguments(model_type=model_type, config_overrides=CLASSIFIERS[model_type])
    options = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    options |= {"cls_token_id": 1, "sep_token_id": 1}
    model = build_text_classifier(flags, ("one", "two"), torch.float32, **options).eval()
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, 5:] = int(not is_padded)
    batch = {"input_ids": torch.arange(2, 26).view(3, 8) * mask, "attention_mask": mask}
    expected = model(**batch).logits
    with padding_known(is_padded):
        logits = model(**batch).logits
    assert torch.equal(logits, expected)
    assert torch.equal(model(**batch).logits, expected)


def test_what_is_known_of_the_padding_is_believed():
    """A mask is left out where nothing is said to be padded, and read where transformers would leave it out."""
    flags = TransformerArguments(model_type="bert", config_overrides=SMALL)
    model = build_text_classifier(flags, ("one", "two"), torch.float32, vocab_size=50, pad_token_id=0).eval()
    tokens, mask = torch.arange(2, 18).view(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    with padding_known(False):
        assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, model(input_ids=tokens).logits)
    assert not torch.equal(model(input_ids=tokens, attention_mask=mask).logits, model(input_ids=tokens).logits)


# What the files hold of a model


def test_a_run_names_the_models_that_go_on_from_it(tmp_path, monkeypatch):
    names = {"run/final": "run", "mine": "mine", "run/link": "link", "owner/other": "other"}
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert {name: TransformerArguments(model_name_or_path=name).name for name in names} == names
    monkeypatch.chdir(tmp_path / "run" / "final")
    assert [TransformerArguments(model_name_or_path=name).name for name in (".", "../final/", "..")] == ["run"] * 3


def test_tensors_that_are_new_or_not_read_are_one_line(folder, caplog, capfd):
    weights = load_file(folder / "model.safetensors")
    weights["odd\x1b[31m"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    flags = TransformerArguments(model_name_or_path=str(folder))
    build_text_classifier(flags, ("a", "b"), torch.float32, pad_token_id=0)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"note: tensors of {folder}: new, at random: score.weight; in its files and not read: odd\\x1b[31m"]
    assert "REPORT" not in "".join(capfd.readouterr())


def test_a_tensor_of_another_shape_is_refused_in_one_line(folder, capfd):
    config = json.loads((folder / "config.json").read_text()) | {"n_positions": 3}
    (folder / "config.json").write_text(json.dumps(config))
    words = r"its files hold transformer.wpe.weight of \(1024, 16\), and the model's is \(3, 16\)"
    with pytest.raises(InputError, match=words):
        build_transformer(AutoModelForCausalLM, TransformerArguments(model_name_or_path=str(folder)), dtype=torch.half)
    assert "REPORT" not in "".join(capfd.readouterr())


def test_a_tensor_that_does_not_convert_is_named(folder):
    """Experts of three sizes, which transformers would stack."""
    config = MixtralConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2)
    config.num_attention_heads = config.num_key_value_heads = 2
    MixtralForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "experts.0" in name)
    save_file(weights | {name: torch.zeros(3, 3)}, folder / "model.safetensors", {"format": "pt"})
    flags = TransformerArguments(model_name_or_path=str(folder))
    with pytest.raises(InputError, match=r"transformers cannot convert its model\.layers\.0\.mlp\.experts") as error:
        build_transformer(AutoModelForCausalLM, flags, dtype=torch.float32)
    assert "\n" not in str(error.value)
