"""``python on_one_device.py FOLDER``: the training recipes on a stand-in for CUDA, with a proof of an offloading plan.

With ``FOLDER optimizers`` it is each recipe with each optimizer of ours instead. Run with ``STANDIN_WAITS`` set.
Leaves ``waits.json``: what the host waits for in the 4th step of each run, which is neither measured nor logged nor
saved; and in a copy of a checkpoint.
"""

import json
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "recipes")]

import image_classification  # noqa: E402
import language_modeling  # noqa: E402
import text_classification  # noqa: E402
from lives import FLAGS  # noqa: E402
from step_waits import waits_of_a_step  # noqa: E402

DECODER = ["--model_type", "gpt2", "--config_overrides", "n_layer=1,n_head=2,n_embd=32"]
RUNS = [(recipe.__name__, recipe, []) for recipe in (image_classification, language_modeling, text_classification)]
RUNS += [
    ("rows that are not packed", language_modeling, ["--no_packing"]),
    ("a classifier that is a decoder", text_classification, DECODER),
    ("muon", language_modeling, ["--optimizer", "muon"]),
    ("stochastic rounding", language_modeling, ["--dtype", "bfloat16", "--optimizer", "adamw_bf16"]),
    ("adafactor", language_modeling, ["--optimizer", "adafactor"]),
]
RUNS.append(("state on the host", language_modeling, ["--offload_optimizer", "state"]))
BY_HOST = ["--offload_optimizer", "step"]
STREAMED = [*BY_HOST, "--stream_weights", "host", "--activation_checkpointing", "full"]
RUNS += [
    ("step on the host", language_modeling, BY_HOST),
    ("weights on the host", language_modeling, STREAMED),
]
OURS = {
    "adamw": [],
    "sgd": ["--optimizer", "sgd"],
    "muon": ["--optimizer", "muon"],
    "stochastic rounding": ["--dtype", "bfloat16", "--optimizer", "adamw_bf16"],
}
BESIDE = {"clipped and averaged": ["--ema_decay", "0.9"], "neither": ["--max_grad_norm", "0"]}
BY_OPTIMIZER = [
    (f"{name}: {optimizer}, {beside}", recipe, [*OURS[optimizer], *BESIDE[beside]])
    for name, recipe, _ in RUNS[:3]
    for optimizer in OURS
    for beside in BESIDE
    if (optimizer, beside) != ("stochastic rounding", "clipped and averaged")  # refused
]
FEW = ["--max_steps", "5", "--logging_steps", "100", "--eval_steps", "100", "--micro_batch_size", "4"]
found: dict[str, dict[str, int]] = {}


def main(folder: Path, *which: str) -> None:
    for name, recipe, flags in BY_OPTIMIZER if which else RUNS:
        AcceleratorState._reset_state(reset_partial_state=True)
        words = [*FLAGS[recipe.__name__], *FEW, *flags]
        with waits_of_a_step(found.setdefault(name, {})):
            recipe.main([*words, "--report_to", "none", "--output_dir", str(folder / name)])
    (folder / "waits.json").write_text(json.dumps(found))
    if which:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    plan = ["--activation_checkpointing", "full_offload", "--verify", "--max_steps", "2", "--report_to", "none"]
    language_modeling.main([*FLAGS["language_modeling"], *plan, "--output_dir", str(folder / "offloaded")])


main(Path(sys.argv[1]), *sys.argv[2:])
