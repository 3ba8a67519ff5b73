"""The predicted memory and time of a step under a plan and under the baseline, as numbers."""

import json
from dataclasses import asdict, dataclass

from memsave_recipes.core.text import format_bytes

HEADINGS = ("blocks", "action", "saved", "baseline", "added")


@dataclass(frozen=True, kw_only=True)
class SpanPrediction:
    """A span of blocks.

    Args:
        blocks: the name of the first one, and after ``..`` that of the last where there are several.
        action: the value of an ``Action``.
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
        added_s: seconds that the plan adds; below 0 if it is faster.
        noise_s: the error of ``baseline_s + added_s``, because the measured times of the blocks vary.
        host_bytes: pinned memory of the host, at most.
    """

    peak_bytes: int
    baseline_peak_bytes: int
    baseline_s: float
    added_s: float
    noise_s: float = 0.0
    host_bytes: int
    spans: tuple[SpanPrediction, ...]

    def to_json(self) -> str:
        """Return all figures, bytes as whole numbers, seconds as ``*_s``."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        """Return a line, and a table with a row for each span."""
        noise = f" ± {1e3 * self.noise_s:.1f} ms" if self.noise_s else ""
        time = f"{1e3 * (self.baseline_s + self.added_s):.1f} ms{noise} (baseline {1e3 * self.baseline_s:.1f} ms)"
        peaks = f"{format_bytes(self.peak_bytes)} (baseline {format_bytes(self.baseline_peak_bytes)})"
        rows = [HEADINGS, *map(_cells, self.spans)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        row_format = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
        lines = [row_format.format(*row).rstrip() for row in rows]
        return "\n".join([f"predicted peak {peaks}, forward and backward {time}", *lines])


def _cells(span: SpanPrediction) -> tuple[str, ...]:
    added = f"{1e3 * span.added_s:+.1f} ms" if span.added_s else ""
    return (span.blocks, span.action, format_bytes(span.saved_bytes), format_bytes(span.baseline_bytes), added)
