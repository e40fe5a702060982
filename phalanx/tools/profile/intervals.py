"""Sets of time as sorted lists of (begin, end) that do not overlap."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

Span = tuple[float, float]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return the times that lie in any of the spans."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def both(first: Spans, second: Spans) -> Spans:
    """Return the times that lie in both sets."""
    found: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def clip(spans: Spans, begin: float, end: float) -> Spans:
    """Return the times of a set between two times; what lies outside is not looked at."""
    first = bisect.bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect.bisect_left(spans, end, lo=first, key=lambda span: span[0])
    return [(max(a, begin), min(b, end)) for a, b in spans[first:last]]


def without(first: Spans, second: Spans) -> Spans:
    """Return the times of the first set that are not in the second."""
    found: Spans = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > begin:
                found.append((begin, second[k][0]))
            begin = max(begin, second[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def total(spans: Spans) -> float:
    """Return the seconds of a set."""
    return sum(end - begin for begin, end in spans)
