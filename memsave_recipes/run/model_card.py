"""The model card: ``final/README.md`` in the Hub's format, with data, settings, versions and figures of the run.

Local folders and files are named by their last part alone: a card is made to be shared.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from memsave_recipes.text import printable

FILE = "README.md"
LIBRARY = "memsave-recipes"
PIPELINES = {
    "image_classification": "image-classification",
    "language_modeling": "text-generation",
    "text_classification": "text-classification",
}
"""Tasks of the Hub, by recipe."""
INPUTS = {"image-classification": "photo.jpg", "text-generation": '"A prompt"', "text-classification": '"A text"'}
METRICS = ("accuracy", "f1", "f1_macro", "loss", "perplexity", "bits_per_byte")
OPTIMIZER = ("optimizer", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay")


@dataclass(frozen=True, eq=False, kw_only=True)
class CardFacts:
    """What a card tells of a run.

    Args:
        model: that is saved, of transformers, peft or torch.
        flags: of the command line.
        results: ``results.json`` as far as it is known before ``final/`` is written.
        steps: optimizer steps that were trained; none with ``--eval_only``.
        batch: the layout of a global batch, in words.
        versions: of the packages, by name.
    """

    model: nn.Module
    flags: dict[str, Any]
    results: dict[str, Any]
    steps: int
    batch: str
    versions: dict[str, str | None]
    mixed_precision: str

    @property
    def name(self) -> str:
        """Of the model."""
        base = self.flags.get("model_name_or_path")
        return shown(base) if base and os.path.exists(base) else self.results["model"]

    @property
    def library(self) -> str:
        """That opens the folder."""
        if hasattr(self.model, "peft_config"):
            return "peft"
        return "transformers" if hasattr(self.model, "save_pretrained") else LIBRARY

    @property
    def data(self) -> str:
        """The data sets, folders or files."""
        named = self.flags.get("dataset") or self.flags.get("data_dir") or self.flags.get("train_file") or "own data"
        names = [shown(name) for name in ([named] if isinstance(named, str) else named)]
        part = self.flags.get("dataset_config_name")
        return ", ".join([*names, *([part] if part else [])])


def shown(name_or_path: str) -> str:
    """A Hub id as it is; of a local path the last part, and the folder of the run before ``final``."""
    path = Path(name_or_path)
    if not os.path.exists(path):
        return printable(name_or_path)
    path = path.resolve()
    return printable(f"{path.parent.name}/{path.name}" if path.name == "final" else path.name)


def write_model_card(folder: Path, facts: CardFacts) -> None:
    """Write ``README.md`` into ``folder``, in place of peft's empty one."""
    ModelCard(f"---\n{_metadata(facts).to_yaml()}\n---\n\n{_text(facts)}", ignore_metadata_errors=True).save(
        folder / FILE
    )


def _metadata(facts: CardFacts) -> ModelCardData:
    base, dataset = facts.flags.get("model_name_or_path"), facts.flags.get("dataset") or ""
    pipeline = PIPELINES.get(facts.results["recipe"])
    return ModelCardData(
        model_name=facts.name,
        library_name=facts.library,
        pipeline_tag=pipeline,
        base_model=base if base and not os.path.exists(base) else None,
        datasets=[dataset] if "/" in dataset else None,
        tags=[LIBRARY],
        eval_results=[
            EvalResult(
                task_type=pipeline or "other",
                dataset_type=facts.data,
                dataset_name=facts.data,
                metric_type=name,
                metric_value=value,
            )
            for name, value in facts.results["eval"].items()
            if name in METRICS
        ]
        or None,
    )


def _text(facts: CardFacts) -> str:
    recipe = facts.results["recipe"]
    figures = [f"- {name}: {value:.4g}" for name, value in facts.results["eval"].items()]
    sections = [
        f"# {facts.name}, {facts.data}",
        f"{_origin(facts)} with the recipe `{recipe}` of {LIBRARY}.",
        _usage(PIPELINES.get(recipe)),
        "## Evaluation\n\n" + ("\n".join(figures) if figures else "Not evaluated."),
        "## Training\n\n" + "\n".join(f"- {name}: {value}" for name, value in _settings(facts)) if facts.steps else "",
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _origin(facts: CardFacts) -> str:
    """Where the weights come from."""
    before = facts.flags.get("model_name_or_path") or facts.flags.get("weights")
    origin = f"`{shown(before)}`" if before else "random weights"
    if facts.steps:
        return f"Trained on {facts.data}, from {origin},"
    return f"Merged from the adapters {origin} and their base model, and evaluated on {facts.data},"


def _usage(pipeline: str | None) -> str:
    if pipeline is None:
        return ""
    return f"## Use\n\n```bash\nmemsave predict FOLDER {INPUTS[pipeline]}\n```"


def _settings(facts: CardFacts) -> Iterator[tuple[str, Any]]:
    flags, results = facts.flags, facts.results
    yield "parameters", f"{results['num_parameters']:,}"
    trained = results.get("num_trained_parameters", results["num_parameters"])
    if trained < results["num_parameters"]:
        yield "trained parameters", f"{trained:,}"
    yield "optimizer steps", facts.steps
    yield "global batch", facts.batch
    yield "activation checkpointing", results["plan"]
    yield "precision", f"parameters in {flags['dtype']}, mixed precision {facts.mixed_precision}"
    yield "seed", flags["seed"]
    for name in OPTIMIZER:
        yield name.replace("_", " "), flags[name]
