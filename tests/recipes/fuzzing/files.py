"""What flags and presets may name: a little data, a small model, a run that is done, and much that is none of these."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

LM_SHAPE = "n_layer=2,n_head=2,n_embd=16,vocab_size=300"
DONE_RUN = ["--model", "vgg_small", "--image_size", "16", "--global_batch_size", "4", "--max_steps", "2"]
DONE_RUN += ["--save_every", "1", "--report_to", "none"]
SMALL_MODEL = ["--model_type", "gpt2", "--config_overrides", LM_SHAPE, "--train_file", "text.jsonl", "--block_size"]
SMALL_MODEL += ["16", "--global_batch_size", "4", "--max_steps", "1", "--report_to", "none"]
PLAN = {"version": 1, "strategy": "mine", "blocks": ["a"], "spans": [{"start": 0, "stop": 1, "action": "keep"}]}


def write_files(folder: Path) -> None:
    """Everything but what a recipe has to make."""
    folder.mkdir()
    _write_data(folder)
    _write_wrecks(folder)
    _write_plans(folder)


def _write_data(folder: Path) -> None:
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "text.txt").write_text("<|endoftext|>".join(texts))
    (folder / "labelled.csv").write_text("text,label\n" + "".join(f"a {n} b,{n % 2}\n" for n in range(24)))
    (folder / "one_class.csv").write_text("text,label\na,1\nb,1\n")
    (folder / "ragged.csv").write_text('text,label\na,1\nb\n"c,2\n')
    (folder / "half.jsonl").write_text('{"text": "a", "label": 0}\n{"text": ')
    (folder / "numbers.jsonl").write_text('{"text": 5, "label": {"a": 1}}\n[1]\n')
    for split in ("train", "validation"):
        for label in ("cat", "dog"):
            place = folder / "images" / split / label
            place.mkdir(parents=True)
            for index in range(3):
                Image.fromarray(np.full((9, 9, 3), index * 40, np.uint8)).save(place / f"{index}.png")


def _write_wrecks(folder: Path) -> None:
    """For every ending that means something: nothing, bytes, a folder."""
    for ending in ("json", "jsonl", "csv", "txt", "parquet", "yaml", "safetensors", "pth", "py"):
        (folder / f"empty.{ending}").touch()
        (folder / f"bytes.{ending}").write_bytes(bytes(range(256)))
        (folder / f"folder.{ending}").mkdir()
    (folder / "lora.yaml").write_text("lora_alpha: 7\nlora_dropout: 0.1\n")
    (folder / "deep.json").write_text("[" * 100_000)
    for name, config in (("no_weights", '{"model_type": "gpt2"}'), ("no_type", "{}"), ("no_json", "{"), ("list", "[]")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    for name, results in (("no_run", "{}"), ("list_run", "[]"), ("half_run", '{"recipe": ')):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(results)
        (folder / name / "metrics.jsonl").write_text("5\n")


def _write_plans(folder: Path) -> None:
    endless = {"start": 0, "stop": 10**12, "action": "keep"}
    plans = {
        "other_blocks": PLAN,
        "endless": PLAN | {"spans": [endless]},
        "no_words": PLAN | {"strategy": 5, "blocks": [[1]]},
        "no_blocks": PLAN | {"blocks": None},
        "not_a_number": PLAN | {"compiled": float("nan")},
        "later_version": PLAN | {"version": 99},
    }
    for name, plan in plans.items():
        (folder / f"{name}.json").write_text(json.dumps(plan))
