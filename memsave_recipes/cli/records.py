"""What a command found as data: everything in bytes and seconds, for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memsave_recipes.cli.recipe import Question
from memsave_recipes.planner.frontier import Point

FORMAT_VERSION = 1


def record_of(question: Question, points: Sequence[Point], **others: Any) -> dict[str, Any]:
    """The question, its candidates and what else was found."""
    target, launch = question.launch.target, question.launch
    return {
        "version": FORMAT_VERSION,
        "recipe": str(question.recipe),
        "flags": list(question.flags),
        "target": {"word": target.word, "name": target.name, "memory_bytes": target.memory_bytes},
        "num_processes": launch.num_processes,
        "mixed_precision": launch.mixed_precision,
        "budget_bytes": question.budget_bytes,
        "remarks": question.remarks,
        **others,
        "candidates": [_of_point(point) for point in points],
    }


def _of_point(point: Point) -> dict[str, Any]:
    """A candidate; ``parts`` add up to ``needed_bytes``."""
    candidate = point.candidate
    peak = candidate.forecast.peak
    return {
        "micro_batch_size": candidate.geometry.micro_batch_size,
        "accumulation_steps": candidate.geometry.accumulation_steps,
        "global_batch_size": candidate.geometry.global_batch_size,
        "loss": candidate.loss,
        "strategy": candidate.strategy,
        "peak_bytes": candidate.peak_bytes,
        "peak_phase": peak.phase,
        "peak_block": peak.block,
        "needed_bytes": candidate.needed_bytes,
        "host_bytes": candidate.host_bytes,
        "parts": candidate.parts,
        "fits": candidate.fits,
        "step_s": candidate.step_s,
        "samples_per_s": candidate.samples_per_s,
        "is_pareto_optimal": point.is_optimal,
        **({"measured": asdict(point.measured)} if point.measured else {}),
        "plan": json.loads(candidate.forecast.plan.to_json()),
    }


def to_json(record: Mapping[str, Any]) -> str:
    """As text, a line at the end."""
    return json.dumps(record, indent=1) + "\n"
