"""Parameter counts, names and shapes are torchvision's, and weight files load without pickle."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.image_classifiers import MODELS, check_image_size, load_weights

# From torchvision's documentation of its weights (https://pytorch.org/vision/stable/models.html), 1000 classes.
NUM_PARAMETERS = {
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg13": 133_047_848,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_parameters(name):
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


def test_names_are_those_of_torchvision():
    with torch.device("meta"):
        vgg = MODELS["vgg16_bn"]().state_dict()
        densenet = MODELS["densenet121"]().state_dict()
    assert vgg["features.40.weight"].shape == (512, 512, 3, 3)
    assert vgg["features.41.running_mean"].shape == (512,)
    assert vgg["classifier.6.weight"].shape == (1000, 4096)
    assert densenet["features.conv0.weight"].shape == (64, 3, 7, 7)
    assert densenet["features.denseblock3.denselayer24.conv1.weight"].shape == (128, 992, 1, 1)
    assert densenet["features.transition2.conv.weight"].shape == (256, 512, 1, 1)
    assert densenet["features.norm5.num_batches_tracked"].shape == ()
    assert densenet["classifier.weight"].shape == (1000, 1024)


def weights_of(name):
    return {key: torch.rand_like(value, dtype=torch.float32) for key, value in MODELS[name]().state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("name", ["vgg_small", "densenet_small"])
def test_a_weight_file_loads(tmp_path, name, suffix):
    path, weights = tmp_path / f"weights{suffix}", MODELS[name]().state_dict()
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    model = MODELS[name]()
    load_weights(model, path)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_the_old_names_in_published_densenet_files_are_understood(tmp_path):
    weights = MODELS["densenet_small"]().state_dict()
    old = {
        key.replace("norm1.", "norm.1.").replace("conv2.", "conv.2.") if "denselayer" in key else key: value
        for key, value in weights.items()
        if "num_batches_tracked" not in key
    }
    torch.save(old, tmp_path / "old.pth")
    model = MODELS["densenet_small"]()
    load_weights(model, tmp_path / "old.pth")
    assert torch.equal(
        model.features.denseblock2.denselayer3.conv2.weight, weights["features.denseblock2.denselayer3.conv2.weight"]
    )


class Malicious:
    def __reduce__(self):
        return print, ("executed",)


def test_bad_files_are_refused_in_one_line(tmp_path, capsys):
    good = MODELS["vgg_small"](num_classes=10).state_dict()
    files = {
        "other_shape.pth": good | {"classifier.6.weight": torch.zeros(3, 128)},
        "missing.pth": {key: value for key, value in good.items() if key != "features.0.bias"},
        "unknown.pth": good | {"extra": torch.zeros(1)},
        "sparse.pth": good | {"features.0.weight": good["features.0.weight"].to_sparse()},
        "meta.pth": good | {"features.0.weight": good["features.0.weight"].to("meta")},
        "complex.pth": good | {"features.0.weight": good["features.0.weight"].to(torch.complex64)},
        "int8.pth": good | {"features.0.weight": good["features.0.weight"].to(torch.int8)},
        "list.pth": [1, 2],
    }
    for name, content in files.items():
        torch.save(content, tmp_path / name)
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "malicious.pth").write_bytes(pickle.dumps(Malicious()))
    for name in [*files, "text.pth", "text.safetensors", "malicious.pth", "absent.pth"]:
        with pytest.raises(InputError, match=name) as refusal:
            load_weights(MODELS["vgg_small"](num_classes=10), tmp_path / name)
        assert "\n" not in str(refusal.value)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_payload_is_refused_without_advice_to_execute_it(tmp_path, is_wrapped):
    path = tmp_path / "malicious.pth"
    if is_wrapped:
        torch.save({"features.0.weight": Malicious()}, path)
    else:
        path.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(InputError, match="no pickle is executed") as refusal:
        load_weights(MODELS["vgg_small"](num_classes=10), path)
    assert "weights_only" not in refusal.value.one_line
    assert "trust" not in refusal.value.one_line


def test_weights_of_another_precision_are_loaded(tmp_path):
    model = MODELS["vgg_small"](num_classes=10)
    torch.save({name: tensor.double() for name, tensor in model.state_dict().items()}, tmp_path / "w.pth")
    load_weights(MODELS["vgg_small"](num_classes=10), tmp_path / "w.pth")


def test_what_has_no_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    for path in (tmp_path / "pipe.pth", "/dev/zero", tmp_path):
        with pytest.raises(InputError, match=f"--weights {path} is not a file"):
            load_weights(MODELS["vgg_small"](num_classes=10), path)


@pytest.mark.parametrize("name", ["vgg_small", "densenet_small", "densenet121"])
def test_a_forward_gives_one_logit_a_class(name):
    assert MODELS[name](num_classes=5)(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(("name", "smallest"), [("vgg_small", 8), ("densenet_small", 13), ("vgg16", 32)])
def test_images_that_shrink_to_nothing_are_refused(name, smallest):
    with torch.device("meta"):
        model = MODELS[name](num_classes=10)
    check_image_size(smallest, model)
    with pytest.raises(InputError, match=f"--image_size {smallest - 1} does not suit"):
        check_image_size(smallest - 1, model)


def test_one_pixel_alone_cannot_be_normalised(make_case):
    model = make_case("resnet50").model
    check_image_size(64, model, 1)
    check_image_size(32, model, 2)
    with pytest.raises(InputError, match=r"--image_size 32, in a last micro-batch of one .* does not suit ResNet"):
        check_image_size(32, model, 1)
    check_image_size(32, make_case("vit").model, 1)
