"""docs/recipes.md on export: its code makes ONNX files of what the recipes save, and llama.cpp's script takes it.

With onnx, onnxscript, onnxruntime, gguf and sentencepiece in the tests' environment, and LLAMA_CPP=FOLDER of a clone of
llama.cpp, ``pytest tests/models/test_export.py`` runs these; without them they are skipped by name.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lives
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from memsave_recipes.models import load

PAGE = (lives.ROOT / "docs/recipes.md").read_text(encoding="utf-8")
(OF_TEXTS,) = re.findall(r"```py\n((?:(?!```).)*?torch\.onnx.*?)```", PAGE, re.S)
OF_IMAGES = """
import torch
from PIL import Image
from memsave_recipes.models import load

saved = load("out/images")
image = Image.new("RGB", (64, 64))
images = saved.processor([image] * 2, return_tensors="pt")["pixel_values"]
options = {"dynamic_shapes": [{0: torch.export.Dim.AUTO}], "output_names": ["logits"], "dynamo": True}
torch.onnx.export(saved.model, (images,), "images.onnx", input_names=["pixel_values"], **options)
"""
OF_LLAMA_CPP = """
import sys

sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf as script
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
script.main()
"""
ONE_STEP = ["--global_batch_size", "8", "--max_steps", "1", "--report_to", "none"]
LABELLED = ["--model_type", "bert", "--config_overrides", f"{lives.TINY_BERT},{lives.WORDS}", "--max_length", "24"]
TEXT = ["--block_size", "32", *lives.OF_TEXT]
LLAMA, GPT2 = ([*lives.scratch(name), *TEXT] for name in ("llama", "gpt2"))
VIT = ["--model_type", "vit", "--config_overrides", lives.TINY_VIT]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``train(recipe, folder, flags)`` trains a step in a folder of its own, where the code of the page runs."""
    monkeypatch.chdir(tmp_path)

    def run(recipe, folder, flags):
        with lives.loaded(recipe) as module:
            module.main([*flags, *ONE_STEP, "--output_dir", folder])

    return run


def largest_difference(path, model, inputs):
    """Between the logits of onnxruntime and of torch, at the tokens that count."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    (logits,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.no_grad():
        expected = model(*inputs.values()) if "pixel_values" in inputs else model(**inputs)
    expected = getattr(expected, "logits", expected)
    assert expected.abs().max() > 1e-3
    difference = np.abs(expected.numpy() - logits)
    return float(difference[inputs["attention_mask"].bool().numpy()].max() if logits.ndim == 3 else difference.max())


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "flags"), [("text_classification", LABELLED), ("language_modeling", LLAMA)])
def test_of_texts_onnx_has_the_logits_of_torch(recipe, flags, train):
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
    train(recipe, "out/text", flags)
    exec(OF_TEXTS, {})
    saved = load("out/text")
    texts = ["one", "three texts, of which one is longer than those that were exported by far", "two"]
    inputs = dict(saved.processor(texts, padding=True, return_tensors="pt"))
    assert largest_difference("text.onnx", saved.model, inputs) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("flags", [VIT, ["--model", "vgg_small"]], ids=["vit", "vgg_small"])
def test_of_images_onnx_has_the_logits_of_torch(flags, train):
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
    train("image_classification", "out/images", flags)
    exec(OF_IMAGES, {})
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert largest_difference("images.onnx", load("out/images").model, {"pixel_values": images}) < 1e-6


def convert(*words, told_the_words=True):
    """What the script of llama.cpp printed; it is told how the tokenizer cuts text into words, or not."""
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP=FOLDER names no clone of llama.cpp")
    folder = os.environ["LLAMA_CPP"]
    script = ["-c", OF_LLAMA_CPP, folder] if told_the_words else [f"{folder}/convert_hf_to_gguf.py"]
    return subprocess.run([sys.executable, *script, *words], capture_output=True, text=True).stderr


@pytest.mark.slow
def test_gguf_has_the_weights_and_the_tokens(train):
    gguf = pytest.importorskip("gguf", reason="pip install gguf sentencepiece")
    train("language_modeling", "out/lm", LLAMA)
    said = convert("out/lm/final", "--outfile", "lm.gguf", "--outtype", "f32")
    assert Path("lm.gguf").is_file(), said
    read = gguf.GGUFReader("lm.gguf")
    weights = load_file("out/lm/final/model.safetensors")
    written = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in read.tensors}
    assert len(written) == len(weights)
    mlp = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    for layer in range(2):
        for name, ours in mlp.items():
            assert written[f"blk.{layer}.ffn_{name}.weight"].equal(weights[f"model.layers.{layer}.mlp.{ours}.weight"])
    assert written["token_embd.weight"].equal(weights["model.embed_tokens.weight"])
    assert written["output.weight"].equal(weights["lm_head.weight"])
    tokens = load("out/lm").processor.get_vocab()
    field = read.fields["tokenizer.ggml.tokens"]
    assert [bytes(field.parts[index]).decode() for index in field.data] == sorted(tokens, key=tokens.get)
    assert bytes(read.fields["tokenizer.ggml.pre"].parts[-1]) == b"gpt-2"


@pytest.mark.slow
def test_what_the_script_does_not_know_is_on_the_page(train):
    pytest.importorskip("gguf", reason="pip install gguf sentencepiece")
    train("language_modeling", "out/lm", GPT2)
    words = ["out/lm/final", "--outfile", "lm.gguf"]
    assert "KeyError: 'n_ctx'" in convert(*words)
    config = json.loads(Path("out/lm/final/config.json").read_text())
    Path("out/lm/final/config.json").write_text(json.dumps(config | {"n_ctx": config["n_positions"]}))
    assert "NotImplementedError: BPE pre-tokenizer was not recognized" in convert(*words, told_the_words=False)
    said = convert(*words)
    assert Path("lm.gguf").is_file(), said
