"""The predicted memory and time of a step under a plan, beside those of the baseline (no checkpointing)."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from memsave_recipes.plans.chain import Chain
from memsave_recipes.plans.plan import Plan
from memsave_recipes.plans.simulate import keep_all, simulate, span_costs
from memsave_recipes.text import format_bytes

HEADINGS = ("blocks", "action", "saved", "baseline", "added")


@dataclass(frozen=True, kw_only=True)
class SpanPrediction:
    """A span of blocks.

    Args:
        blocks: the name of the first one, and after ``..`` that of the last where there are several.
        action: as ``Action``.
        saved_bytes, baseline_bytes: saved for backward, under the plan and under the baseline.
        added_s: seconds that the plan adds to the step.
    """

    blocks: str
    action: str
    saved_bytes: int
    baseline_bytes: int
    added_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A training step under a plan: one forward and backward of the micro-batch, and the optimizer's update.

    Args:
        peak_bytes, baseline_peak_bytes: the most that is allocated, under the plan and under the baseline.
        baseline_s: seconds of a forward and backward under the baseline.
        added_s: seconds that the plan adds; below 0 where it is faster.
        host_bytes: pinned memory of the host, at most.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    baseline_s: float
    added_s: float
    host_bytes: int
    spans: tuple[SpanPrediction, ...]

    @classmethod
    def of(cls, chain: Chain, plan: Plan) -> "Prediction":
        """By the costs in ``chain``.

        Raises:
            ValueError: as ``simulate``.
        """
        simulated, baseline = simulate(chain, plan), keep_all(chain)
        kept = [costs.held_bytes for costs in span_costs(chain, baseline)]
        spans = (
            SpanPrediction(
                blocks="..".join(dict.fromkeys((plan.blocks[span.start], plan.blocks[span.stop - 1]))),
                action=str(span.action),
                saved_bytes=costs.held_bytes,
                baseline_bytes=sum(kept[span.start : span.stop]),
                added_s=costs.added_s,
            )
            for span, costs in zip(plan.spans, span_costs(chain, plan), strict=True)
        )
        return cls(
            peak_bytes=simulated.peak_bytes,
            baseline_peak_bytes=simulate(chain, baseline).peak_bytes,
            baseline_s=sum(block.forward_s + block.backward_s for block in chain.blocks),
            added_s=simulated.added_s,
            host_bytes=simulated.host_bytes,
            spans=tuple(spans),
        )

    def to_json(self) -> str:
        """All figures, bytes as whole numbers, seconds as ``*_s``."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """A line, and a table with a row for each span."""
        time = f"{1e3 * (self.baseline_s + self.added_s):.1f} ms (baseline {1e3 * self.baseline_s:.1f} ms)"
        peaks = f"{format_bytes(self.peak_bytes)} (baseline {format_bytes(self.baseline_peak_bytes)})"
        rows = [HEADINGS, *map(_cells, self.spans)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        return "\n".join([f"predicted peak {peaks}, forward and backward {time}", *lines])


def _cells(span: SpanPrediction) -> tuple[str, ...]:
    added = f"{1e3 * span.added_s:+.1f} ms" if span.added_s else ""
    return (span.blocks, span.action, format_bytes(span.saved_bytes), format_bytes(span.baseline_bytes), added)


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[Any]:
    return [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
