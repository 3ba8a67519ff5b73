"""Command lines of ``memsave plan``, ``fit``, ``recipes`` and ``compare`` at random."""

from random import Random

from fuzzing.lines import SELDOM, Line, some_of
from fuzzing.programs import RECIPES
from fuzzing.values import FLAGS, PLANS, Values

IMAGES = FLAGS["image_classification"]
RECIPE = str(RECIPES / "image_classification.py")
SMALL = ["--model", "vgg_small", "--image_size", "16", "--global_batch_size", "2", "--micro_batch_size", "2"]
SMALL += ["--activation_checkpointing", "full", "--augmentation", "none"]
FILES = ("out.json", "a b.json")
NO_FILES = ("f/folder.json", "absent/x.json", "n" * 300)
WRITES = Values((), (None, "", *NO_FILES), FILES)

COMMANDS: dict[str, tuple[list[list[str]], dict[str, Values]]] = {
    "plan": (
        [["RECIPE", *SMALL], ["f/empty.py"], ["f/bytes.py"], ["f/folder.py"], ["f/empty.json"], [""], ["absent"]],
        {
            "target": Values(("a100", "h100"), (None, "", "x100", "é")),
            "num_processes": Values(("1", "2"), (None, "0", "-1", "x", "1.5", ""), ("1000000000",)),
            "mixed_precision": Values(("no", "bf16"), (None, "", "x")),
            "memory_budget_gib": Values(("1", "80"), (None, "0", "-1", "nan", "inf", "x", ""), ("1e300", "1e-9")),
            "plan": WRITES,
            "html": WRITES,
            "json": Values(("-",), WRITES.bad, FILES),
            "activation_checkpointing": Values(("none", "full"), PLANS.bad),
            **{flag: IMAGES[flag] for flag in ("seed", "dtype", "learning_rate", "max_steps")},
            "output_dir": Values(("run", "a b"), (None, "")),
            "host_memory": Values(("64GiB",), (None, "", "x", "-1", "0"), ("1e3",)),
            "interconnect": Values((), (None, "", "x", "0", "-1", "nan"), ("25",)),
            "largest": Values((), (None, "", "x"), ("micro_batch_size", "block_size")),
            "all": Values((None,), ("x",)),
        },
    ),
    "fit": (
        [["vgg_small"], ["f/done"], ["f/empty.json"], [""], ["absent/x"]],
        {
            "card": Values(("a100",), (None, "", "x100"), ("cpu",)),
            "image_size": Values(("32",), (None, "0", "-1", "x", ""), ("1", "17")),
            "global_batch_size": Values(("4",), (None, "0", "x", "")),
            "micro_batch_size": Values(("2",), (None, "0", "x", "")),
            "optimizer": Values(("sgd", "adamw"), (None, "", "x")),
            "mixed_precision": Values(("bf16",), (None, "", "x"), ("no", "fp16")),
            "length": Values((), (None, "0", "x", ""), ("16",)),
            "json": WRITES,
        },
    ),
    "recipes": ([[]], {"copy": Values(("a b", "c"), (None, "", "file", "n" * 300))}),
    "compare": (
        [["f/done"], ["f/done", "f/no_run"], ["f/list_run", "f/half_run"], ["f/empty.json"], [""], []],
        {
            "baseline": Values(("f/done",), (None, "", "absent", "f/no_weights")),
            **dict.fromkeys(("html", "png"), WRITES),
            "markdown": Values((None, "-"), NO_FILES, FILES),
        },
    ),
}


def memsave_line(random: Random, text: str) -> Line:
    """One of them, most often of something that can be planned or compared."""
    command = random.choice(list(COMMANDS))
    things, flags = COMMANDS[command]
    words = random.choice(things) if random.random() < SELDOM else things[0]
    line = Line("memsave", [command, *(RECIPE if word == "RECIPE" else word for word in words)])
    line.refused = len(words) < 2 and words is not things[0]
    for flag, value in some_of(random, flags, "good", "good", "odd", "bad", "words", most=3):
        line.give(flag, value, joined=random.random() < SELDOM)
    line.judge(flags)
    if random.random() < SELDOM:
        line.words += random.choice([["--what"], ["-x"], ["--=1"], ["--targt", "cpu"], ["--baselin=a"], [f"--{text}"]])
        line.refused = True
    return line
