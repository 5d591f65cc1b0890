"""What all pictures share: figures without global state, lines, and files in three formats.

matplotlib is optional (the extra `plot`) and imported when a picture is asked for. Figures are made
directly, never through pyplot, so that no settings of a surrounding program are read for the
backend or changed.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PyramidKVError, first_line
from ..records import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
PIXELS_PER_INCH = 150
TEXT_SIZE = 11  # points; legible when a picture 10 inches wide is shown 1,000 pixels wide

LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#0072b2", "linestyle": "--", "marker": "s"},
    {"color": "#d55e00", "linestyle": "-.", "marker": "^"},
    {"color": "#009e73", "linestyle": (0, (1, 1.2)), "marker": "D"},
    {"color": "#9a9a9a", "linestyle": (0, (7, 2)), "marker": "v"},
    {"color": "#cc79a7", "linestyle": (0, (4, 1, 1, 1, 1, 1)), "marker": "P"},
)
"""Lines told apart by dashes and marker as well as by colour (Okabe and Ito's, safe for readers
who see fewer colours)."""


class PlotError(PyramidKVError):
    """A picture that cannot be drawn or written; the message says what to do."""


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be made, before any work.

    Raises:
        PlotError: the file's suffix is none of the formats, or matplotlib is missing.
    """
    _format(path)
    _import_figure()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, that lays itself out so that nothing overlaps.

    Raises:
        PlotError: matplotlib is missing.
    """
    figure = _import_figure()(figsize=(width, height))
    figure.set_layout_engine("constrained", wspace=0.06)  # room between one's axis and the next's
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return figure


def heading(figure: Figure, text: str) -> None:
    """Put a text above all axes; it is shown as it is, dollar signs included."""
    figure.suptitle(text, fontsize=TEXT_SIZE + 1, parse_math=False)


def label(axes: Axes, x: str, y: str) -> None:
    """Name the axes, with their units, and draw light lines at the ticks of y."""
    axes.set_xlabel(x, fontsize=TEXT_SIZE)
    axes.set_ylabel(y, fontsize=TEXT_SIZE)
    axes.tick_params(labelsize=TEXT_SIZE - 1)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def line(index: int, points: int) -> dict[str, Any]:
    """Return how to draw the line of this index: some eight markers, not below the next line's."""
    every = max(1, points // 8)
    return {
        **LINES[index % len(LINES)],
        "markevery": (index * every // len(LINES), every),
        "markersize": 6,
        "linewidth": 1.8,
    }


def legend(axes: Axes, title: str, columns: int = 2, **options: Any) -> None:
    """Put the legend above the axes, where it hides no data."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        title=title,
        title_fontsize=TEXT_SIZE,
        fontsize=TEXT_SIZE - 1.5,
        frameon=False,
        handlelength=3.2,
        columnspacing=1.2,
        **options,
    )


def whole_ticks(axes: Axes) -> None:
    """Put ticks at whole numbers of x only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def short(name: str) -> str:
    """Return the last part of a model's name, which may be a path."""
    return name.rstrip("/").rpartition("/")[2] or name


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, as the suffix says, whole or not at all.

    Raises:
        PlotError: the suffix is none of these.
        OSError: the folder does not exist or cannot be written.
    """
    form = _format(path)
    with replacing(path) as temporary:  # whose name has no suffix to tell the format by
        _write(figure, temporary, form)


def to_svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG file, the same for the same figure."""
    with io.BytesIO() as file:
        _write(figure, file, "svg")
        return file.getvalue().decode()


def _write(figure: Figure, file: Path | io.BytesIO, form: str) -> None:
    """Write a figure; SVG without a date and with names that are the same each time."""
    import matplotlib

    fixed: dict[Any, str] = {"svg.hashsalt": "pyramidkv", "svg.fonttype": "path"}
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {}
    with matplotlib.rc_context(fixed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # names in any script
        figure.savefig(file, format=form, dpi=PIXELS_PER_INCH, metadata=metadata)


def drawable(text: str, most: int = 60) -> str:
    """Return a text as pictures can show it: one line, no surrogates or control characters."""
    shown = "".join(
        "\N{REPLACEMENT CHARACTER}" if "\ud800" <= sign <= "\udfff" or ord(sign) < 32 else sign
        for sign in text
    )
    return shown if len(shown) <= most else shown[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _format(path: Path) -> str:
    form = path.suffix[1:].lower()
    if form not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise PlotError(f"cannot draw {str(path)!r}: a picture's name must end in one of {allowed}")
    return form


def _import_figure() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PlotError("pictures need matplotlib; pip install 'pyramidkv[plot]'") from None
    except ImportError as error:
        raise PlotError(
            f"matplotlib is installed but cannot be loaded ({first_line(error)}); reinstall it: "
            "pip install --force-reinstall 'pyramidkv[plot]'"
        ) from None
    return Figure
