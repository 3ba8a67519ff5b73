"""Every flag of the recipes, with values that must pass, that must be refused, and that may do either.

Flags that no table has are added by their types, as the recipes declare them.

A value is the text that a person types; ``None`` is a flag without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from fuzzing.programs import MAINS

NO_NUMBERS = (None, "", "x", "1,5", "None", "0x10", "²", "--", "1 2", "[1]", "9" * 5000)
NO_WHOLE_NUMBERS = (*NO_NUMBERS, "1.5", "nan", "inf", "1e3", "true")
ODD_PATHS = ("", "absent", "f/images/train/cat/0.png", "f/empty.json", "f/folder.json", "/proc/self/mem", "n" * 300)
SWITCH = ((None, "true", "no", "1", "False"), ("", "maybe", "2", "None", "[]"))


@dataclass(frozen=True)
class Values:
    """Of one flag.

    Args:
        good: the flag alone never refuses these; with others they may contradict.
        bad: these are always refused.
        words: and so are these, which are not even of the right type.
        odd: what happens to these is left open.
        codes: in which a run with one of ``odd`` may end, beside 0 and 2.
    """

    good: Sequence[str | None] = ()
    bad: Sequence[str | None] = ()
    odd: Sequence[str | None] = ()
    words: Sequence[str | None] = ()
    codes: tuple[int, ...] = ()


def whole(*good: str, least: int = 1, odd: Sequence[str] = (), codes: tuple[int, ...] = ()) -> Values:
    """Of a flag that takes whole numbers from ``least`` on."""
    return Values(good, (str(least - 1), "-7", str(10**30)), odd, NO_WHOLE_NUMBERS, codes)


def real(*good: str, bad: Sequence[str] = (), odd: Sequence[str] = (), codes: tuple[int, ...] = ()) -> Values:
    """Of a flag that takes finite numbers from 0 on."""
    return Values(good, ("nan", "inf", "1e309", "-1", *bad), odd, NO_NUMBERS, codes)


SHAPES = {
    "gpt2": "n_layer=2,n_head=2,n_embd=16,vocab_size=300",
    "bert": "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=16,vocab_size=300",
    "vit": "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=16,patch_size=8",
}
"""Of models that train in a moment."""
WRONG_SHAPES = ("", "=", "n_layer", "hidden_size", "num_hidden_layers=x", "nothing=1", "vocab_size=x", "vocab_size=1,")
ODD_SHAPES = ("n_head=0", "n_head=3", "num_attention_heads=3", "n_embd=0", "n_embd=-4", "hidden_size=0", "vocab_size=3")
ODD_SHAPES += ("n_layer=0", "num_hidden_layers=-1", "patch_size=0", "n_positions=2", "max_position_embeddings=4")
ODD_SHAPES += ("activation_function=x", "hidden_act=x", "hidden_dropout_prob=2", "resid_pdrop=-1", "dtype=x")
ODD_SHAPES += ("num_labels=0", "image_size=3", "num_channels=1", "id2label=3", "n_embd=4000000", "hidden_size=4000000")

PLANS = Values(
    good=("none", "full", "every:1", "every:2", "segments:1", "segments:2", "nested:1", "offload", "full_offload"),
    bad=(
        *(None, "", " ", "all", "full:2", "none:", "segments", "segments:", "segments:0", "segments:x", "segments:-1"),
        *("segments:999", "segments:1.5", "segments:²", "segments:" + "9" * 5000, "every:0", "every:999", "compiled:2"),
        *("compiled:", "compiled:x", "compiled:nan", "compiled:-1", "budget:", "budget:x", "None", "é"),
        *(f"f/{name}.json" for name in ("empty", "bytes", "folder", "deep", "absent", "other_blocks", "endless")),
        *(f"f/{name}.json" for name in ("no_words", "no_blocks", "not_a_number", "later_version")),
    ),
    odd=("selective", "bottleneck", "budget", "budget:bitwise", "plan.json"),
)

RUN = {
    "global_batch_size": whole("1", "3", "8", odd=("2000", "1000000000"), codes=(3,)),
    "micro_batch_size": Values(("1", "2", "99"), ("0", "-1", "autos"), ("auto",), NO_WHOLE_NUMBERS),
    "activation_checkpointing": PLANS,
    "memory_budget_gib": real(bad=("0",), odd=("0.5", "1e-9", "1e300", "80"), codes=(3,)),
    "compile": Values(("no", "none", "auto"), ("", "x", "None")),
    "verify": Values(("off",), ("", "x", "2", "None"), (None, "stop", "warn", "true"), codes=(5,)),
    "num_epochs": real("0.01", "1", "1e-300", bad=("0", "1e300")),
    "max_steps": whole("1", "2"),
    "seed": whole("0", "7", "123456789", least=0, odd=("4294967295", "4294967296")),
    "full_determinism": Values(*SWITCH),
    "matmul_precision": Values(("highest", "high", "medium"), (None, "", "low")),
    "dtype": Values(("float32", "bfloat16", "float64", "auto"), (None, "", "float16", "Float32", "32")),
    "dataloader_num_workers": whole("0", "1", least=0),
    "eval_steps": whole("1", "5"),
    "logging_steps": whole("1", "3"),
    "report_to": Values(("none",), (None, "", "trakio", "None", "none none,", "-"), ("tensorboard",)),
    "overwrite": Values(*SWITCH),
    "output_dir": Values(
        ("run", "a/b/run", "ein Lauf", "l'été 走", "run\n2", "[b]run[/b]", "%s"),
        (None, "", "file", "file/run", "/sys/run", "n" * 300, "\udcff"),
        (".",),
    ),
}
BATCHNORM = {
    "batchnorm": Values(("local",), (None, "", "Global", "sync"), ("global",)),
}
OPTIMIZER = {
    "optimizer": Values(("adamw", "adafactor", "sgd"), (None, "", "adam", "SGD"), ("adamw_8bit", "adamw_bf16", "muon")),
    "optimizer_in_backward": Values(("no",), SWITCH[1], (None,), codes=(4,)),
    "learning_rate": real("0", "1e-3", "1e-300", ".5", bad=("1e308",), odd=("1e30", "1e10"), codes=(4,)),
    "weight_decay": real("0", "0.1", bad=("1e308",), odd=("1e30",), codes=(4,)),
    "lr_scheduler_type": Values(("linear", "cosine", "polynomial", "constant", "inverse_sqrt"), (None, "", "lin")),
    "warmup_steps": whole("0", "1", least=0, odd=("50",)),
    "max_grad_norm": real("0", "1", "1e-300", "1e20"),
}
SAFETY = {
    "resume": Values(*SWITCH),
    "save_every": Values(("0", "1", "2", "1min"), (None, "", "-1", "1.5", "min", "x"), codes=(4,)),
    "save_best": Values(("no", "loss"), ("", "x"), (None, "yes")),
}
TRANSFORMER = {
    "model_name_or_path": Values((), (None, *ODD_PATHS, "f/no_weights", "a b", "é")),  # a base names another model
    "config_overrides": Values((), (None, *WRONG_SHAPES), ODD_SHAPES, codes=(3,)),
    "attn_implementation": Values(("eager",), (None, "", "flash_attention_9", "é"), ("sdpa",)),
    "trust_remote_code": Values(*SWITCH),
    "fused_ops": Values(("auto", "none"), (None, "", "x", "regions")),
}
LORA = {
    "lora": Values(*SWITCH),
    "lora_rank": whole("1", "4", odd=("1000000000",), codes=(3,)),
    "lora_config": Values(("f/lora.yaml",), (None, *ODD_PATHS, "f/bytes.yaml", "f/deep.json", "f/list/config.json")),
    "load_in_4bit": Values(("no",), (*SWITCH[1], None)),
    "stream_weights": Values(("none",), ("", "disk", "None"), ("host", None)),
}
TEXT = {
    "dataset": Values((), (None, *ODD_PATHS, "a/b", "é")),  # a base names files
    "dataset_config_name": Values((), (None, "x")),
    "tokenizer_name": Values((), (None, *ODD_PATHS, "f/no_weights", "f/list")),
}
"""What the recipes of text share."""

LABELS = {
    "label_smoothing_factor": real("0", "0.1", bad=("1", "2")),
    "class_weights": Values(("balanced",), (None, *ODD_PATHS)),
}
FLAGS: dict[str, dict[str, Values]] = {
    "image_classification": {
        **(RUN | BATCHNORM | OPTIMIZER | SAFETY | LABELS),
        "dataset": Values(("digits",), (None, *ODD_PATHS, "a/b", "digit")),
        "data_dir": Values(("f/images",), (None, *ODD_PATHS)),
        "image_size": whole("8", "16", "17", odd=("1", "2", "5", "1000000"), codes=(3,)),
        "augmentation": Values(("digits", "article", "none", "mixup"), (None, "", "x")),
        "channels_last": Values(*SWITCH),
        "model": Values((), (None, "", "vgg", "VGG16", "é"), ("vgg_small", "densenet_small")),
        "weights": Values((), (None, *ODD_PATHS, "f/bytes.safetensors", "f/empty.pth", "f/bytes.pth", "f/folder.pth")),
        **TRANSFORMER,
    },
    "language_modeling": {
        **(RUN | OPTIMIZER | SAFETY | LORA | TRANSFORMER | TEXT),
        "train_file": Values(
            ("f/text.jsonl",),
            (None, *ODD_PATHS, "f/bytes.txt", "f/half.jsonl", "f/numbers.jsonl", "f/bytes.parquet", "f/empty.jsonl"),
            ("f/text.txt",),
        ),
        "validation_file": Values(("f/text.txt",), (None, *ODD_PATHS, "f/empty.txt"), ("f/labelled.csv",)),
        "streaming": Values(("no",), (*SWITCH[1], None)),
        "block_size": whole("2", "16", "33", least=2, odd=("2000", "2000000000"), codes=(3,)),
        "packing": Values(*SWITCH),
        "sequence_parallel": whole("1", odd=("2",)),
        "loss": Values(("auto", "full", "chunked", "chunked:64"), (None, "", "x", "liger", "chunked:0", "full:8")),
        "model_type": Values(("gpt2",), (None, "", "nothing", "resnet", "../gpt2"), ("bert", "t5", "clip")),
    },
    "text_classification": {
        **(RUN | OPTIMIZER | SAFETY | LORA | TRANSFORMER | TEXT | LABELS),
        "train_file": Values(
            ("f/labelled.csv",),
            (None, *ODD_PATHS, "f/one_class.csv", "f/half.jsonl", "f/numbers.jsonl", "f/bytes.csv", "f/empty.csv"),
            ("f/ragged.csv",),
        ),
        "validation_file": Values(("f/labelled.csv",), (None, *ODD_PATHS, "f/bytes.parquet", "f/folder.csv")),
        "text_column": Values(("text",), (None, "", "x", "é"), ("label",)),
        "label_column": Values(("label",), (None, "", "x"), ("text",)),
        "max_length": whole("8", "16", least=8, odd=("512", "513", "2000000000")),
        "model_type": Values(("bert",), (None, "", "nothing", "resnet"), ("gpt2", "t5", "distilbert")),
    },
}

NOT_DRAWN = {"eval_only"}  # no config.json


def _of_kind(kind: Any) -> Values:
    """Of a flag in no table above, by its type: what its values do is left open, and other words are refused."""
    kinds = set(get_args(kind)) or {kind}
    if bool in kinds:
        return Values((), SWITCH[1], (None, "true", "no"))
    if int in kinds:
        return Values((), (), ("0", "1", "2", "-7"), NO_WHOLE_NUMBERS, codes=(4,))
    if float in kinds:
        return Values((), (), ("0", "0.5", "1", "-1", "1e300", "nan"), NO_NUMBERS, codes=(4,))
    choices = tuple(one for one in kinds if isinstance(one, str))
    return Values((), ("",), choices or ("x", "é", "f/done", "full", "none"))


for name, flags in FLAGS.items():
    kinds = get_type_hints(MAINS[name].Arguments)
    unknown = [
        one.name for one in fields(MAINS[name].Arguments) if one.metadata and one.name not in flags.keys() | NOT_DRAWN
    ]
    flags |= {flag: _of_kind(kinds[flag]) for flag in unknown}
