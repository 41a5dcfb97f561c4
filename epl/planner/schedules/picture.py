"""What pictures of measured and of predicted timelines have in common. It needs matplotlib, the package does not."""

from typing import Any, Dict, Iterable, Sequence, Tuple

from epl.errors import EplError

COLOURS: Dict[str, str] = {
    "F": "#7aa6d9",
    "B": "#e8a05c",
    "W": "#9cc48a",
    "optimizer": "#b48ec9",
    "transfer": "#5f6f7a",
    "collective": "#c65b5b",
    "bubble": "#eceff1",
}
NAMES = {"F": "forward", "B": "backward", "W": "weights' gradients"}
_MS = 1e3
_LABELS = 400
"""With more actions than these in a panel their labels would be unreadable."""


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib `Figure` of that size in inches.

    Raises:
      EplError: matplotlib is missing.
    """
    try:
        # Without pyplot: it would pick a display and keep every figure.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EplError("The picture needs matplotlib (%s); install it with: pip install matplotlib. The table needs nothing" % error) from error
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def draw_rows(panel: Any, rows: Sequence[Tuple[int, Sequence[Any]]]) -> None:
    """Rows of spans (`epl.planner.schedules.Span`, seconds) at their heights, in ms, on a background that shows where they idle."""
    crowded = sum(len(spans) for _, spans in rows) > _LABELS
    for at, spans in rows:
        first, last = spans[0].start * _MS, spans[-1].end * _MS
        panel.broken_barh([(first, last - first)], (at - 0.32, 0.6), facecolors=COLOURS["bubble"], linewidth=0)
        for kind in dict.fromkeys(span.action.kind for span in spans):
            ranges = [(span.start * _MS, (span.end - span.start) * _MS) for span in spans if span.action.kind == kind]
            panel.broken_barh(ranges, (at - 0.32, 0.6), facecolors=COLOURS[kind], edgecolors="white", linewidth=0.5)
        for span in spans if not crowded else ():
            if span.end > span.start:
                text = "%s%d" % (span.action.kind, span.action.micro_batch)
                panel.text((span.start + span.end) / 2 * _MS, at - 0.02, text, ha="center", va="center", fontsize=7, clip_on=True)


def draw_strip(panel: Any, at: float, kind: str, start: float, end: float) -> None:
    """A thin bar under the actions of a row: a transfer, a collective or the optimizer, in seconds."""
    panel.broken_barh([(start * _MS, (end - start) * _MS)], (at - 0.04, 0.08), facecolors=COLOURS[kind], linewidth=0)


def label_rows(panel: Any, labels: Sequence[str]) -> None:
    """Name the rows, the first one on top."""
    panel.set_yticks(range(len(labels)), labels, fontsize=9)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.spines[["top", "right"]].set_visible(False)


def draw_legend(figure: Any, kinds: Iterable[str]) -> None:
    """What the colours of these kinds mean, below all panels."""
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[kind], label=NAMES.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=8, frameon=False)
