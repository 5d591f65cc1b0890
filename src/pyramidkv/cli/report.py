"""`pyramidkv report`: one page about evaluation runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import display, inputs

if TYPE_CHECKING:
    from ..evaluation.report_page import Picture


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Folders of `pyramidkv eval`.")
    ],
    output: Annotated[Path, typer.Option(help="The page, HTML in one file.")] = Path("report.html"),
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write its pictures here too, as PNG and SVG."),
    ] = None,
) -> None:
    """Make a page about evaluation runs; it opens without network.

    The folders hold one run, whole or in shards, or a query-aware and a query-agnostic
    run of the same samples. Needs no GPU.
    """
    read = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    inputs.check_files({"--output": output}, read)
    _check_folder(pictures)
    inputs.check_picture(Path("picture.svg"))

    # From here on numpy and matplotlib are needed.
    from ..evaluation.report import read_sections
    from ..evaluation.report_page import make_page, make_pictures

    sections = read_sections(folders)
    drawn = make_pictures(sections)
    page = make_page(sections, drawn)
    if pictures is not None:
        _write_pictures(pictures, [one for section in drawn for one in section], output)
    inputs.write_text(output, page)
    samples = " and ".join(f"{len(section.lines):,}" for section in sections)
    display.console().print(f"{output}: {samples} samples", soft_wrap=True, markup=False)


def _check_folder(folder: Path | None) -> None:
    """Refuse a folder for pictures that cannot be made or written to."""
    if folder is None:
        return
    if folder.is_dir():
        inputs.check_files({"--pictures": folder / "picture.svg"})
    elif folder.exists():
        raise inputs.InputError(f"--pictures {str(folder)!r} is no folder; name one")
    else:
        inputs.check_files({"--pictures": folder})


def _write_pictures(folder: Path, pictures: list[Picture], output: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise inputs.InputError(f"cannot make {str(folder)!r}: {error.strerror}") from None
    paths = {one.name: [folder / f"{one.name}.{form}" for form in ("png", "svg")]
             for one in pictures}  # fmt: skip
    named = {f"picture {path.name}": path for both in paths.values() for path in both}
    inputs.check_files({"--output": output, **named})
    for one in pictures:
        for path in paths[one.name]:
            inputs.write_picture(path, one.figure)
