"""What a run leaves in ``final/``: others open it, it predicts what the run evaluated, and it trains further."""

import json
import shutil

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from lives import write_rows
from peft import AutoPeftModelForCausalLM, PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from samples import sample
from transformers import (
    AutoModelForImageClassification,
    GPT2Tokenizer,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from memsave_recipes import estimate
from memsave_recipes.data.text.tokenizers import load_tokenizer
from memsave_recipes.data.vision.decoding import decode
from memsave_recipes.data.vision.images import ImageDataArguments, read_images
from memsave_recipes.models import load
from memsave_recipes.tools.inference import PredictArguments, predict, read_inputs
from memsave_recipes.training.checkpoints.commit import verify_manifest

RECIPE = "image_classification"
VIT = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,patch_size=4"
MODELS = {"vgg_small": ["--model", "vgg_small"], "vit": ["--model_type", "vit", "--config_overrides", VIT]}
IMAGES = ["--image_size", "16", "--max_steps", "30", "--learning_rate", "3e-3", "--augmentation", "none"]
BERT = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,vocab_size=300"
TEXTS = ["--max_length", "24", "--global_batch_size", "16"]
ROWS = ["--block_size", "32", "--global_batch_size", "4"]
GPT2 = ["--model_type", "gpt2", "--config_overrides", "n_layer=2,n_head=2,n_embd=32,vocab_size=300"]
QWEN = (
    "num_hidden_layers=1,hidden_size=32,intermediate_size=64,num_attention_heads=2,num_key_value_heads=2,vocab_size=300"
)
of_texts = pytest.mark.parametrize("recipe", ["text_classification"], indirect=True)
of_tokens = pytest.mark.parametrize("recipe", ["language_modeling"], indirect=True)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def accuracy(folder, inputs, labels, **flags):
    """Of the model in ``folder``, by its predictions."""
    saved, flags = load(folder), PredictArguments(top_k=1, batch_size=64, **flags)
    rows = predict(saved, read_inputs(list(map(str, inputs)), saved, flags), flags)
    named = [row["predictions"][0]["label"] for row in rows]
    assert len(named) == len(labels)
    return sum(map(str.__eq__, named, labels)) / len(labels)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """The held-out digits as PNGs, and their classes."""
    folder = tmp_path_factory.mktemp("digits")
    rows = read_images(ImageDataArguments())[0]["validation"]
    names = rows.features["label"].names
    for index, row in enumerate(rows):
        datasets.Image().decode_example(row["image"]).save(folder / f"{index:03}.png")
    return folder, [names[row["label"]] for row in rows]


@pytest.fixture(scope="module", params=MODELS)
def classifier(request, run_once):
    """The folder of a run on the digits."""
    return run_once(*MODELS[request.param], *IMAGES)


def test_predictions_are_as_right_as_the_evaluation(classifier, held_out):
    folder, labels = held_out
    predicted = accuracy(classifier, [folder], labels)
    assert predicted == results(classifier)["eval"]["accuracy"]
    assert predicted > 0.11  # the share of the largest class is 0.103


def test_an_image_classifier_trains_further_as_it_was_trained(classifier, train, tmp_path):
    again = train("--model_name_or_path", str(classifier / "final"), *IMAGES, "--eval_only", output="evaluated")
    assert again["eval"] == pytest.approx(results(classifier)["eval"], rel=1e-6)
    train("--model_name_or_path", str(classifier / "final"), *IMAGES, "--max_steps", "1")
    processors = [folder / "final" / "preprocessor_config.json" for folder in (classifier, tmp_path / "run")]
    assert processors[0].read_text() == processors[1].read_text()
    assert load(tmp_path / "run").label_names == load(classifier).label_names


def test_a_pipeline_of_transformers_opens_a_vision_transformer(run_once, held_out):
    run = run_once(*MODELS["vit"], *IMAGES, "--max_steps", "2")
    path = held_out[0] / "000.png"
    answers = pipeline("image-classification", str(run / "final"), top_k=10)(str(path))
    probabilities = load(run).logits([decode({"path": str(path), "bytes": None})]).softmax(-1)[0]
    expected = dict(zip(load(run).label_names, probabilities.tolist(), strict=True))
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(expected, abs=1e-6)


def test_the_normalisation_of_the_first_training_is_that_of_the_second(run_once, train, tmp_path):
    folder = run_once(*MODELS["vit"], *IMAGES, "--max_steps", "1") / "final"
    path = folder / "preprocessor_config.json"
    entries = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    train("--model_name_or_path", str(folder), *IMAGES, "--max_steps", "1")
    saved = json.loads((tmp_path / "run" / "final" / path.name).read_text())
    assert {name: saved[name] for name in entries} == entries


def test_the_card_of_an_image_classifier(classifier):
    final, figures = classifier / "final", results(classifier)["eval"]
    verify_manifest(final)
    text = (final / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.pipeline_tag == "image-classification"
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == figures
    assert "optimizer steps: 30" in text
    assert "seed: 0" in text
    assert f"torch {torch.__version__}"[:10] in text


def test_cards_have_no_local_paths(run_once, tmp_path):
    data = tmp_path / "pets"
    for split, name in ((split, name) for split in ("train", "validation") for name in ("cat", "dog")):
        (data / split / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), (255 * (name == "cat"), 0, 0)).save(data / split / name / "1.png")
    flags = ["--data_dir", str(data), "--image_size", "16", "--max_steps", "1", "--augmentation", "none"]
    first = run_once(*MODELS["vgg_small"], *flags, folder=tmp_path / "first")
    second = run_once("--model_name_or_path", str(first / "final"), *flags, folder=tmp_path / "second")
    for run in (first, second):
        text = (run / "final" / "README.md").read_text()
        assert "pets" in text
        assert str(tmp_path) not in text
    assert "from `first/final`" in text
    assert load(second).label_names == ("cat", "dog")
    third = run_once(*MODELS["vgg_small"], "--dataset", str(data), *flags[2:], folder=tmp_path / "third")
    card = ModelCard((third / "final" / "README.md").read_text())
    assert card.data.datasets is None
    assert str(tmp_path) not in card.content


@pytest.fixture(scope="module", params=["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def image_base(request, tmp_path_factory):
    """A folder with a model of transformers for images of 16 pixels, of linear layers or of convolutions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "vit":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **sizes))
    else:
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        model = ResNetForImageClassification(ResNetConfig(**sizes))
    model.save_pretrained(folder)
    return folder


def test_averaged_adapters_of_an_image_classifier_predict_and_train_further(run_once, image_base, held_out):
    lora = ["--lora", "--lora_rank", "4", "--learning_rate", "1e-2", "--max_steps", "20", "--ema_decay", "0.5"]
    adapted = run_once("--model_name_or_path", str(image_base), *IMAGES, *lora)
    assert accuracy(adapted, [held_out[0]], held_out[1]) == results(adapted)["eval"]["accuracy"]
    evaluated = run_once("--model_name_or_path", str(adapted / "final"), *IMAGES, "--eval_only")
    assert results(evaluated)["eval"] == results(adapted)["eval"]
    saved, image = load(adapted), decode({"path": str(held_out[0] / "000.png"), "bytes": None})
    torch.manual_seed(7)  # of a head that the adapters have to replace
    labels = {"num_labels": 10, "ignore_mismatched_sizes": True}
    base = AutoModelForImageClassification.from_pretrained(image_base, **labels)
    by_peft = PeftModel.from_pretrained(base, adapted / "final", is_trainable=True).eval()
    with torch.no_grad():
        logits = by_peft(**saved.processor([image], return_tensors="pt")).logits
    torch.testing.assert_close(logits, saved.logits([image]))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Texts of two classes, some longer than ``--max_length``."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = ("cats", "dogs")
    texts = [
        {"text": f"{index} " * (index % 30) + f"{words[index % 2]} run", "label": words[index % 2]}
        for index in range(60)
    ]
    write_rows(path, texts)
    return path, [row["label"] for row in texts]


@of_texts
def test_texts_are_cut_as_in_the_evaluation(run_once, labelled):
    path, labels = labelled
    files = ["--train_file", str(path), "--validation_file", str(path)]
    flags = ["--model_type", "bert", "--config_overrides", BERT, *files, *TEXTS, "--learning_rate", "1e-2"]
    run = run_once(*flags, "--max_steps", "20")
    assert results(run)["eval"]["accuracy"] == accuracy(run, [path], labels)
    again = run_once(*flags, "--max_steps", "2")  # its tokens come from the cache
    assert load(again).processor.init_kwargs["max_length"] == 24


@of_texts
def test_adapters_of_a_text_classifier_predict_and_are_evaluated(run_once, labelled):
    path, labels = labelled
    files = ["--train_file", str(path), "--validation_file", str(path), *TEXTS]
    base = run_once("--model_type", "bert", "--config_overrides", BERT, *files, "--max_steps", "2")
    lora = ["--lora", "--lora_rank", "4", "--learning_rate", "1e-2", "--max_steps", "20"]
    adapted = run_once("--model_name_or_path", str(base / "final"), *files, *lora)
    assert results(adapted)["eval"]["accuracy"] == accuracy(adapted, [path], labels)
    text = (adapted / "final" / "README.md").read_text()
    assert ModelCard(text).data.library_name == "peft"
    assert "More Information Needed" not in text  # of peft's template
    assert str(base) not in text
    of_adapters = ["--model_name_or_path", str(adapted / "final"), *files]
    evaluated = run_once(*of_adapters, "--eval_only")
    assert results(evaluated)["eval"] == results(adapted)["eval"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("seven and seven are fourteen. " * 400)
    return str(path)


@pytest.fixture(scope="module")
def adapted(run_once, text_file):
    """The folders of a language model, and of adapters of it."""
    base = run_once(*GPT2, *ROWS, "--train_file", text_file, "--max_steps", "5")
    flags = ["--train_file", text_file, *ROWS, "--lora", "--lora_rank", "4", "--learning_rate", "1e-3"]
    return base, run_once("--model_name_or_path", str(base / "final"), *flags, "--max_steps", "5")


@of_tokens
def test_a_tokenizer_of_another_class_makes_the_same_tokens_afterwards(run_once, tmp_path, caplog):
    """Qwen 2 splits numbers into digits, and this one does not."""
    path = tmp_path / "text.txt"
    path.write_text("the year 1984 and the year 2048\n" * 300)
    files = ["--train_file", str(path), *ROWS]
    load_tokenizer(None, [path.read_text()], vocab_size=300).save_pretrained(tmp_path / "trained")
    GPT2Tokenizer.from_pretrained(tmp_path / "trained").save_pretrained(tmp_path / "given")
    of_qwen = ["--model_type", "qwen2", "--config_overrides", QWEN, "--tokenizer_name", str(tmp_path / "given")]
    run = run_once(*of_qwen, *files, "--max_steps", "2")
    assert "note: AutoTokenizer takes Qwen2Tokenizer for final/" in caplog.text
    evaluated = run_once("--model_name_or_path", str(run / "final"), *files, "--eval_only")
    assert results(evaluated)["eval"] == results(run)["eval"]


@pytest.mark.slow
@of_tokens
def test_adapters_go_on_training_under_any_plan(run_once, adapted, text_file):
    flags = ["--model_name_or_path", str(adapted[1] / "final"), "--train_file", text_file, *ROWS, "--max_steps", "5"]
    plain, planned = (
        run_once(*flags, "--activation_checkpointing", plan, "--learning_rate", "1e-3") for plan in ("none", "full")
    )
    before, after = (results(run)["eval"]["loss"] for run in (adapted[1], plain))
    assert after < before
    assert results(planned)["eval"] == results(plain)["eval"]
    assert results(planned)["num_trained_parameters"] == results(adapted[1])["num_trained_parameters"]
    config = json.loads((plain / "final" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(adapted[0] / "final"))


@of_tokens
def test_adapters_are_evaluated_without_training_and_merge_by_peft(run_once, adapted, text_file):
    flags = ["--model_name_or_path", str(adapted[1] / "final"), "--train_file", text_file, *ROWS, "--eval_only"]
    evaluated = run_once(*flags)
    assert results(evaluated)["eval"] == results(adapted[1])["eval"]
    assert not (evaluated / "final").exists()
    tokens = torch.arange(5, 20)[None]
    with torch.no_grad():
        expected = load(adapted[1]).model(tokens).logits
        model = AutoPeftModelForCausalLM.from_pretrained(adapted[1] / "final").merge_and_unload()
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@of_tokens
def test_a_base_that_has_changed_under_its_adapters_is_named(adapted, tmp_path, caplog):
    for run, name in zip(adapted, ("base", "adapters"), strict=True):
        shutil.copytree(run / "final", tmp_path / name)
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(tmp_path / "base")}))
    load(tmp_path / "adapters")
    assert not caplog.records
    weights = load_file(tmp_path / "base" / "model.safetensors")
    largest = max(weights, key=lambda name: weights[name].numel())
    weights[largest] = torch.zeros_like(weights[largest])
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    load(tmp_path / "adapters")
    line = f"note: the weights of {tmp_path}/base have changed since the adapters of {tmp_path}/adapters were saved"
    assert [record.getMessage() for record in caplog.records] == [line]


LLAMA = f"{QWEN},num_hidden_layers=2,max_position_embeddings=64"
FROM_SCRATCH = {
    "gpt2": ("language_modeling", GPT2),  # whose head is tied
    "mixtral": ("language_modeling", ["--model_type", "mixtral", "--config_overrides", f"{LLAMA},num_local_experts=2"]),
    "bert": ("text_classification", ["--model_type", "bert", "--config_overrides", BERT]),
    "vit": ("image_classification", MODELS["vit"]),
}


@pytest.mark.parametrize(
    ("recipe", "flags"),
    sample([FROM_SCRATCH[name] for name in ("gpt2", "vit")], FROM_SCRATCH.values()),
    ids=FROM_SCRATCH,
    indirect=["recipe"],
)
def test_adapters_of_a_model_from_scratch_keep_it(recipe, flags, train, labelled, text_file, tmp_path):
    """The same figures under another seed; they train further, and may be moved."""
    data = {
        "language_modeling": ["--train_file", text_file, *ROWS],
        "text_classification": ["--train_file", labelled[0], "--validation_file", labelled[0], *TEXTS],
        "image_classification": [*IMAGES, "--max_steps", "2"],
    }[recipe.__name__]
    trained = train(*flags, *data, "--lora", "--learning_rate", "1e-2", "--max_steps", "3", "--save_best")["eval"]
    (tmp_path / "run").rename(tmp_path / "moved")
    load(tmp_path / "moved")
    assert [*tmp_path.glob("moved/checkpoints/best-*/base/model.safetensors")]
    further = ["--model_name_or_path", tmp_path / "moved/final", *data, "--learning_rate", "0", "--max_steps", "1"]
    assert train(*further, output="further")["eval"] == pytest.approx(trained, rel=1e-5)
    again = ["--model_name_or_path", tmp_path / "moved/final", *data, "--eval_only", "--seed", "7"]
    assert train(*again, output="again")["eval"] == pytest.approx(trained, rel=1e-5)
    shutil.rmtree(tmp_path / "moved")
    load(tmp_path / "further")


@of_tokens
def test_a_language_model_continues_prompts_alike_alone_and_together(adapted):
    saved = load(adapted[0])
    flags = [PredictArguments(batch_size=size, max_new_tokens=8) for size in (1, 2)]
    inputs = read_inputs(["seven and", "seven and seven are"], saved, flags[0])
    alone, together = (predict(saved, inputs, each) for each in flags)
    assert alone == together
    assert all(row["generated_text"] and not row["generated_text"].startswith(row["input"]) for row in alone)


@of_tokens
def test_flags_that_contradict_the_adapters_are_refused(refuse, adapted, text_file, tmp_path):
    flags = ["--model_name_or_path", str(adapted[1] / "final"), "--train_file", text_file, *ROWS]
    (tmp_path / "lora.yaml").write_text("target_modules: [c_proj]")
    assert "holds adapters with their own: leave it out" in refuse(*flags, "--lora_config", tmp_path / "lora.yaml")


@of_tokens
def test_adapters_whose_base_is_missing_are_refused_by_its_name(refuse, adapted, text_file, tmp_path):
    config = json.loads((adapted[1] / "final" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    tokenizer = ["--tokenizer_name", str(adapted[0] / "final")]
    flags = ["--model_name_or_path", str(tmp_path / "adapters"), "--train_file", text_file, *ROWS]
    assert f"holds adapters of {tmp_path / 'gone'}, which cannot be loaded" in refuse(*flags, *tokenizer)


@of_texts
def test_adapters_for_another_task_are_refused(refuse, tmp_path, labelled):
    folder = tmp_path / "adapters"
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "r": 16}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    line = refuse("--model_name_or_path", str(folder), "--lora_rank", "5", "--train_file", str(labelled[0]))
    assert "--lora_rank 5: the adapters of" in line


def test_adapters_of_text_are_no_image_classifier(refuse, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": "SEQ_CLS"}))
    assert "holds adapters of a language model" in refuse("--model_name_or_path", str(tmp_path))


@of_tokens
def test_a_plan_for_adapters_is_estimated_from_their_shapes(recipe, adapted, text_file):
    flags = ["--train_file", text_file, *ROWS, "--micro_batch_size", "2", "--output_dir", "out"]
    tasks = (recipe.task(["--model_name_or_path", str(run / "final"), *flags]) for run in adapted)
    whole, of_adapters = (estimate(task, target="h100").candidates[0].parts for task in tasks)
    assert of_adapters["optimizer state"] < whole["optimizer state"]
