"""A saved model is loaded with its classes and its processing of inputs, from any folder that a recipe leaves."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BitImageProcessorPil,
    ConvNextImageProcessorPil,
    EfficientNetImageProcessorPil,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MarianConfig,
    MarianMTModel,
    MobileViTImageProcessorPil,
    Pix2StructImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from memsave_recipes.core.errors import InputError
from memsave_recipes.data.vision.augmentation import to_pixel_values
from memsave_recipes.data.vision.decoding import resized
from memsave_recipes.models import image_classifiers, load
from memsave_recipes.models.image_classifiers import MODELS, ImageModelArguments, build_image_classifier, normalization
from memsave_recipes.models.pretrained import open_image_processor
from memsave_recipes.models.saved import layout_of, save_image_classifier

NAMES = ("cat", "dog", "eel")
OF_IMAGES = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def picture(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def convnet(tmp_path):
    """A model of ours in training mode, and its folder."""
    torch.manual_seed(0)
    model = MODELS["vgg_small"](num_classes=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    files = {"architecture": "vgg_small", "label_names": NAMES, "dtype": torch.float32, "image_size": 16}
    save_image_classifier(tmp_path, **files, **OF_IMAGES)
    return model, tmp_path


def pixels_of(image, size):
    cropped = torch.from_numpy(np.array(resized(image, size))).permute(2, 0, 1)
    return to_pixel_values(cropped[None], None, mean=OF_IMAGES["mean"], std=OF_IMAGES["std"], dtype=torch.float32)


def test_a_convnet_has_its_classes_and_the_pixels_of_training(convnet):
    model, folder = convnet
    saved, image = load(folder), picture(40, 23)
    assert saved.label_names == NAMES
    assert not saved.model.training
    expected = model.eval()(pixels_of(image, 16))
    torch.testing.assert_close(saved.logits([image]), expected, rtol=1e-5, atol=1e-6)


def test_images_of_every_mode_are_taken(convnet):
    saved = load(convnet[1])
    images = [picture(20, 20).convert(mode) for mode in ("RGB", "L", "P", "RGBA", "CMYK")]
    assert saved.logits(images).shape == (5, 3)


def test_half_precision_is_kept(convnet):
    model, folder = convnet
    save_file(model.bfloat16().state_dict(), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    saved = load(folder)
    assert {parameter.dtype for parameter in saved.model.parameters()} == {torch.bfloat16}
    assert saved.logits([picture(20, 20)]).dtype == torch.float32


def test_an_image_can_be_cropped_out_of_the_middle(tmp_path):
    """The shorter side is resized to S, and the middle of the longer one is kept."""
    files = {"architecture": None, "label_names": (), "dtype": torch.float32, "image_size": 16}
    save_image_classifier(tmp_path, **files, **OF_IMAGES)
    image = picture(64, 32)
    pixels = BitImageProcessorPil.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values
    cropped = image.resize((32, 16), Image.Resampling.BILINEAR).crop((8, 0, 24, 16))
    torch.testing.assert_close(pixels, pixels_of(cropped, 16), rtol=0, atol=1e-6)


def test_a_convnet_is_trained_further_with_the_same_normalisation(convnet):
    model, folder = convnet
    flags = ImageModelArguments(model_name_or_path=str(folder))
    assert normalization(flags) == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    again = build_image_classifier(flags, NAMES, 16, torch.float32, with_weights=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PROCESSORS = {
    "values as they are": (ViTImageProcessorPil, {"do_rescale": False, **HALF}),
    "from 0 to 1": (ViTImageProcessorPil, {"do_normalize": False}),
    "bytes": (ViTImageProcessorPil, {"do_normalize": False, "do_rescale": False}),
    "another factor": (
        ViTImageProcessorPil,
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.7] * 3},
    ),
    "one number": (ViTImageProcessorPil, {"image_mean": 0.4, "image_std": 0.3}),
    "BGR": (MobileViTImageProcessorPil, {}),
    "BGR of bytes": (MobileViTImageProcessorPil, {"do_rescale": False}),
    "RGB": (MobileViTImageProcessorPil, {"do_flip_channel_order": False}),
    "divided twice": (EfficientNetImageProcessorPil, {}),
    "from -1 to 1": (
        EfficientNetImageProcessorPil,
        {"rescale_offset": True, "include_top": False, "do_normalize": False},
    ),
    "all of it": (EfficientNetImageProcessorPil, {"rescale_offset": True, "rescale_factor": 1 / 127.5}),
    "a crop": (ConvNextImageProcessorPil, {"crop_pct": 0.9}),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_the_models_own_processor(tmp_path, case):
    kind, entries = PROCESSORS[case]
    own = kind(size={"height": 16, "width": 16}, **entries)
    own.save_pretrained(tmp_path)
    flags = ImageModelArguments(model_name_or_path=str(tmp_path))
    image = picture(16, 16)
    expected = own(image, do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values.float()
    raw = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    found = to_pixel_values(raw, None, **normalization(flags), dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    files = {"architecture": None, "label_names": (), "dtype": torch.float32, "image_size": 16}
    save_image_classifier(tmp_path / "final", **files, **normalization(flags))
    saved = open_image_processor(tmp_path / "final", trust_remote_code=False)
    torch.testing.assert_close(saved(image, return_tensors="pt").pixel_values, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "entries", "words"),
    [
        (ViTImageProcessorPil, {"image_mean": [0.5, 0.5]}, "cannot be followed ("),
        (ViTImageProcessorPil, {"image_std": 0.0}, "cannot be followed (it does not just rescale and normalise"),
        (ViTImageProcessorPil, {"image_mean": "x"}, "cannot be followed ("),
        (Pix2StructImageProcessorPil, {}, "cannot be followed ("),
        (None, {"image_processor_type": "NoSuchProcessor"}, "cannot be followed ("),
    ],
)
def test_a_processor_that_cannot_be_followed_is_named(tmp_path, kind, entries, words):
    if kind is not None:
        kind().save_pretrained(tmp_path)
        entries = json.loads((tmp_path / "preprocessor_config.json").read_text()) | entries
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
    with pytest.raises(InputError, match=rf"--model_name_or_path {tmp_path}: its image processor") as caught:
        normalization(ImageModelArguments(model_name_or_path=str(tmp_path)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda pixels: (pixels / 255) ** 2,
        lambda pixels: pixels.flip(0) / 255 - 0.5,
        lambda pixels: pixels.mean(0, keepdim=True).expand(3, 8, 8),
        lambda pixels: pixels[:1],
        lambda pixels: pixels * 0,
    ],
)
def test_values_that_no_mean_and_deviation_make_are_refused(convnet, monkeypatch, function):
    def processor(images, **_):
        return {"pixel_values": torch.stack([function(torch.tensor(image).double()) for image in images])}

    monkeypatch.setattr(image_classifiers, "open_image_processor", lambda *_, **__: processor)
    with pytest.raises(InputError, match="cannot be followed"):
        normalization(ImageModelArguments(model_name_or_path=str(convnet[1])))


def test_other_classes_get_a_new_last_layer_and_a_line_says_so(convnet, caplog):
    model, folder = convnet
    flags = ImageModelArguments(model_name_or_path=str(folder))
    again = build_image_classifier(flags, ("a", "b"), 16, torch.float32, with_weights=True).state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(again[name][:2], tensor[:2])}
    assert changed == {"classifier.6.weight"}  # both biases are zero
    assert again["classifier.6.weight"].shape[0] == 2
    assert "the last layer of the model is new" in caplog.text


def test_flags_of_transformers_do_not_shape_a_saved_convnet(convnet):
    with pytest.raises(InputError, match="--attn_implementation is for models of transformers"):
        ImageModelArguments(model_name_or_path=str(convnet[1]), attn_implementation="eager")


def empty(folder):
    folder.mkdir()


def unfinished_run(folder):
    (folder / "checkpoints").mkdir(parents=True)


def without_processor(folder):
    config = ViTConfig(image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ViTForImageClassification(config).save_pretrained(folder)


def no_classifier(folder):
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(folder)


def other_weights(folder):
    folder.mkdir()
    files = {"architecture": "vgg_small", "label_names": NAMES, "dtype": torch.float32, "image_size": 16}
    save_image_classifier(folder, **files, **OF_IMAGES)
    save_file(MODELS["vgg_small"](num_classes=4).state_dict(), folder / "model.safetensors")


def adapters_without_a_base(folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM", "base_model_name_or_path": null}')


def adapters_of_a_missing_base(folder):
    folder.mkdir()
    config = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "/no/such/model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def damaged_config(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (empty, "holds no model"),
        (unfinished_run, "has no final/, so its run is not finished"),
        (without_processor, "has no preprocessor_config.json"),
        (no_classifier, "holds bert, no classifier or causal language model"),
        (other_weights, "size mismatch for classifier.6"),
        (adapters_without_a_base, "names no base model"),
        (adapters_of_a_missing_base, r"holds adapters of /no/such/model, which cannot be loaded \(no such folder\)"),
        (damaged_config, "cannot be loaded"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused_by_name(tmp_path, make, message):
    make(tmp_path / "folder")
    with pytest.raises(InputError, match=message) as refusal:
        load(tmp_path / "folder")
    assert str(tmp_path / "folder") in refusal.value.one_line
    assert "--model_name_or_path" not in refusal.value.one_line


def test_the_package_is_imported_without_torch():
    check = "import sys, memsave_recipes.models; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


TINY = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MARIAN = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "decoder_start_token_id": 0}


def neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**TINY, bos_token_id=0, eos_token_id=0))


def marian():
    sides = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    return MarianMTModel(MarianConfig(vocab_size=96, max_position_embeddings=32, **sides, **MARIAN))


@pytest.mark.parametrize(
    ("build", "written", "name"),
    [
        (neox, "embed_out.weight", "lm_head.weight"),
        (marian, "final_logits_bias", "final_logits_bias"),  # a buffer; positions are left out, and embeddings tied
    ],
)
def test_the_layout_is_that_of_save_pretrained(tmp_path, build, written, name):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size=5000)
    layout = layout_of(model, 5000)
    names = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names[path.name] = set(file.keys())
    assert {file: inside.keys() for file, inside in layout.files.items()} == names
    assert layout.index == json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {inside[written] for inside in layout.files.values() if written in inside} == {name}
