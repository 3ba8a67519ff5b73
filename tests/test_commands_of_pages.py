"""Every command of README and docs runs as it is printed, on a CPU and with small sizes, page by page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
BESIDE_THE_TABLE = "accelerate launch --config_file accelerate_configs/single_gpu.yaml "
TRY = f"{BESIDE_THE_TABLE}recipes/image_classification.py --model vgg_small --output_dir out/try --overwrite "
SMALL = [  # sizes and files, in this order
    (r"\bvgg16(_bn)?\b", r"vgg_small\1"),
    (r"\bdensenet121\b", "densenet_small"),
    (r"\b(num_hidden_layers|n_layer|num_attention_heads|n_head|num_key_value_heads)=\d+", r"\1=2"),
    (r"\b(hidden_size|n_embd)=\d+", r"\1=32"),
    (r"\bintermediate_size=\d+", "intermediate_size=64"),
    (r"--model_type (gpt2|llama)(?!.*overrides)", "--model_type gpt2 --config_overrides n_layer=2,n_embd=32,n_head=2"),
    (r"--(block_size|image_size) \d+", r"--\1 32"),
    (r"(?=.*docstring-chats)(.*--block_size) \d+", r"\1 512"),  # room for an answer
    (r"\bvocab_size=\d+", "vocab_size=512"),
    (r"--(num_processes|sequence_parallel) \d+", r"--\1 2"),
    (r"/fsdp2\.yaml", "/cpu_fsdp2.yaml"),
    (r'"num_decay_steps": 200', '"num_decay_steps": 1'),
    (r"--train_file FILE\b", "--train_file texts.txt"),
    (r"\bfit (FOLDER_OF_A_MODEL|MODEL)\b", "fit model"),
]
OF_A_RUN = "--max_steps 2 --report_to none"
UNLESS_NAMED = {  # by words of a launch without a preset
    "--data_dir": "--image_size 32 --global_batch_size 8",
    "language_modeling": "--block_size 32 --global_batch_size 8",
    "text_classification": "--max_length 16 --global_batch_size 8",
}
NOT_RUN = {
    r"^(pip|git|hf) |^make ": "installs, or needs a network",
    r"bert_glue|llama_8b|chat_lora|meta-llama|image_text.*MODEL|out/photos": "names a model or data of the Hub",
    r"\$SCRATCH|SLURM|^wait": "SLURM",
    r"multi_node|--nnodes": "several machines",
    r"^(LAUNCH=\S+ )?wandb |^trackio show": "a server: recipes/../run/test_sweep.py",
    r"^python benchmarks": "a benchmark, or writes into docs/",
}
SAMPLE = {"dashboards.md": "", "README.md": r"demo\.yaml|memsave compare"}
"""Lines of these pages that every run of the tests runs."""


def commands_of(page):
    """The lines of ``bash`` blocks, and the commands in the README's table."""
    found = re.findall(
        r"```bash\n(.*?)```|^\|[^\n]*`(recipes/\S+\.py .*?)`", page.read_text(encoding="utf-8"), re.S | re.M
    )
    lines = []
    for block, cell in found:
        lines += [f"{BESIDE_THE_TABLE}{cell}"] if cell else block.replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s+#.*", "", line) for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def reasons(line):
    return [why for pattern, why in NOT_RUN.items() if re.search(pattern, line)]


def small(line):
    """The line with small sizes; flags alone are those of a run."""
    line = f"{TRY}{line}" if line.startswith("--") else line
    for pattern, instead in SMALL:
        line = re.sub(pattern, instead, line)
    if not re.search(r"launch .*recipes/", line):
        return line
    line = re.sub(r"--max_steps \d+", "", line) + f" {OF_A_RUN}"
    for word, flags in UNLESS_NAMED.items() if "--config " not in line else ():
        for flag, value in re.findall(r"(--\w+) (\S+)", flags):
            line += f" {flag} {value}" if word in line and flag not in line else ""
    return line


def make_files(folder):
    """What the pages' names stand for."""
    for name in ("recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    for number, place in enumerate(f"{split}/{kind}" for split in ("train", "validation") for kind in "ab"):
        (folder / "DIR" / place).mkdir(parents=True)
        for shade in range(8):
            Image.new("RGB", (32, 32), (30 * shade, 60 * number, 0)).save(folder / "DIR" / place / f"{shade}.png")
    Image.new("RGB", (32, 32)).save(folder / "photo.jpg")
    (folder / "more_photos").mkdir()
    Image.new("RGB", (32, 32)).save(folder / "more_photos" / "1.png")
    (folder / "texts.txt").write_text("The quick brown fox jumps over the lazy dog, and trains.\n" * 400)
    (folder / "rows.jsonl").write_text('{"body": "Returns nothing."}\n')
    (folder / "model").mkdir()
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 64}
    (folder / "model" / "config.json").write_text(
        json.dumps({**bert, "num_hidden_layers": 2, "num_attention_heads": 2})
    )


def make_run(folder, plan):
    folder.mkdir(parents=True)
    results = {"model": "vgg_small", "plan": plan, "memory": {"peak_allocated_gib": 1.0}}
    for name, content in (("results.json", json.dumps(results)), ("config.json", "{}"), ("metrics.jsonl", "")):
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [*SAMPLE.items(), *(pytest.param(name, "", marks=pytest.mark.slow) for name in PAGES if SAMPLE.get(name) != "")],
)
@pytest.mark.timeout(1800)
def test_commands_run(name, wanted, tmp_path):
    lines = [line for line in commands_of(PAGES[name]) if re.search(wanted, line) and not reasons(line)]
    make_files(tmp_path)
    if name == "dashboards.md":
        for run, plan in {"plain": "none", "segments": "segments:2", "sweep/one": "full"}.items():
            make_run(tmp_path / "out" / run, plan)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "memsave").write_text(f'#!/bin/sh\nexec {sys.executable} -m memsave_recipes.tools.cli "$@"\n')
    (tmp_path / "bin" / "memsave").chmod(0o755)
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    before, failed = "", []
    for line in map(small, lines):
        if re.match(r"\w+=\S*$", line):  # a variable of the lines below
            before += f"{line}; "
            continue
        done = subprocess.run(
            ["bash", "-c", before + line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            failed.append(f"{line}\n{done.stdout[-800:]}\n{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)


def test_what_is_not_run_is_listed_once_and_is_there():
    lines = [line for page in PAGES.values() for line in commands_of(page)]
    assert {why for line in lines for why in reasons(line)} == set(NOT_RUN.values())
    assert sum(not reasons(line) for line in lines) > 40
