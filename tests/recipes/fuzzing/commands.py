"""Command lines of ``memsave plan`` and ``memsave compare`` at random."""

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
        },
    ),
    "compare": (
        [["f/done"], ["f/done", "f/no_run"], ["f/list_run", "f/half_run"], ["f/empty.json"], [""], []],
        {
            "baseline": Values(("f/done",), (None, "", "absent", "f/no_weights")),
            **dict.fromkeys(("html", "csv", "png"), WRITES),
            "markdown": Values((None, "-"), NO_FILES, FILES),
        },
    ),
}


def memsave_line(random: Random, text: str) -> Line:
    """One of the two, most often of something that can be planned or compared."""
    command = random.choice(list(COMMANDS))
    things, flags = COMMANDS[command]
    words = random.choice(things) if random.random() < SELDOM else things[0]
    line = Line("memsave", [command, *(RECIPE if word == "RECIPE" else word for word in words)])
    line.refused = words[1:] == [] and words != ["f/done"]
    for flag, value in some_of(random, flags, "good", "good", "odd", "bad", "words", most=3):
        line.give(flag, value, joined=random.random() < SELDOM)
    line.judge(flags)
    if random.random() < SELDOM:
        line.words += random.choice([["--what"], ["-x"], ["--=1"], ["--targt", "cpu"], ["--baselin=a"], [f"--{text}"]])
        line.refused = True
    return line
