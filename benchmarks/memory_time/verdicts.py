"""What the figures of one model say: ours against every point of the others, and the claims of the project.

NOTE [ ours against a point of another's ]
Nothing is interpolated: of our points, the fastest that needs no more memory than the other's point does stands against
it. Within ``SAME_MEMORY`` of plain's activation peak counts as no more. Their medians are compared, and what differs by
no more than the noise of the run is a tie.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from models import CNNS, LANGUAGE_MODELS

from memory_time.methods import BUDGET, OURS, PLAIN, PLAIN_CHUNKED, SEGMENTS, SEQUENTIAL, WHOLE

SAME_MEMORY = 0.005
FASTER, TIE, SLOWER, OUT_OF_REACH = "faster", "as fast", "slower", "not as small"
MODERATE, MOST_WHERE_MODERATE, MOST_WHERE_TIGHT = 0.6, 0.5, 0.85
A_THIRD = 1 / 3
Row = dict[str, Any]


def judge(model: str, rows: Sequence[Row], noise: float) -> dict[str, Any]:
    """The duels, and those claims that are about a model of this kind.

    A language model's others meet ours once more without anything that compiles: those are plain's very bits.
    """
    verdict: dict[str, Any] = {"noise": noise, "duels": duels(rows, noise)}
    if model in CNNS:
        verdict["added_time"] = added_time(verdict["duels"], noise)
    if model in LANGUAGE_MODELS:
        verdict["in_a_third"] = in_a_third(rows)
        same_bits = [row for row in rows if row["series"] not in (BUDGET, WHOLE)]
        verdict["duels_without_compiling"] = duels(same_bits, noise)
    return verdict


def duels(rows: Sequence[Row], noise: float) -> list[dict[str, Any]]:
    """Ours against every point of the others, from the largest to the smallest; see the NOTE above."""
    running = [row for row in rows if "share" in row]
    ours = [row for row in running if row["series"] in OURS]
    others = [row for row in running if row["series"] not in (*OURS, PLAIN, PLAIN_CHUNKED)]
    return [_duel(other, ours, noise) for other in sorted(others, key=lambda row: -row["share"])]


def _duel(other: Row, ours: Sequence[Row], noise: float) -> dict[str, Any]:
    duel = {key: other[key] for key in ("series", "method", "share", "time_ratio")}
    as_small = [row for row in ours if row["share"] <= other["share"] + SAME_MEMORY]
    if not as_small:
        return {**duel, "outcome": OUT_OF_REACH}
    best = min(as_small, key=lambda row: row["time_ratio"])
    against = best["time_ratio"] / other["time_ratio"]
    outcome = FASTER if against < 1 - noise else SLOWER if against > 1 + noise else TIE
    ours_here = {"ours": best["method"], "ours_share": best["share"], "ours_time_ratio": best["time_ratio"]}
    return {**duel, **ours_here, "against": against, "outcome": outcome}


def added_time(duels: Sequence[dict[str, Any]], noise: float) -> dict[str, Any]:
    """Time that ours adds to plain, by the time that the segments of others add at the same memory.

    ``moderate`` are the points from ``MODERATE`` of plain's activation peak on, ``tight`` those below. Points whose own
    added time is within the noise say nothing. Where ``checkpoint_sequential`` raises, ours stands in for it.
    """
    points = [duel for duel in duels if duel["series"] in (SEQUENTIAL, SEGMENTS) and "against" in duel]
    points = [duel for duel in points if duel["time_ratio"] - 1 > noise]

    def over(shares: Sequence[dict[str, Any]], most: float) -> dict[str, Any]:
        fractions = [(duel["ours_time_ratio"] - 1) / (duel["time_ratio"] - 1) for duel in shares]
        if not fractions:
            return {"points": 0}
        return {"points": len(fractions), "median": median(fractions), "largest": max(fractions), "most": most}

    return {
        "moderate": over([duel for duel in points if duel["share"] >= MODERATE], MOST_WHERE_MODERATE),
        "tight": over([duel for duel in points if duel["share"] < MODERATE], MOST_WHERE_TIGHT),
    }


def in_a_third(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The fastest of ours in a third of plain's activation peak."""
    small = [row for row in rows if row["series"] in OURS and row.get("share", 1.0) <= A_THIRD]
    if not small:
        return None
    best = min(small, key=lambda row: row["time_ratio"])
    return {key: best[key] for key in ("method", "share", "time_ratio")}


def count(duels: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many duels ended in which way."""
    return {
        outcome: sum(duel["outcome"] == outcome for duel in duels) for outcome in (FASTER, TIE, SLOWER, OUT_OF_REACH)
    }
