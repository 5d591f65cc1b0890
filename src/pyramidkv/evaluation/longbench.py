"""LongBench v1: its 21 tasks, with the official prompts, lengths and metrics.

`longbench.json` holds what the benchmark fixes. The samples are read from a folder of the official
files, one `<task>.jsonl` per task, or from the archive of them on the hub.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..hub import NotOnHubError, download
from .jsonl import DataError, Line, read_lines
from .metrics import MetricError, find_metric
from .sample import Sample


@dataclass(frozen=True)
class Task:
    """What LongBench fixes for a task.

    Attributes:
        prompt: the official template with `{context}` and, behind it, `{input}` if it has one.
        max_new_tokens: where an answer ends at the latest.
        metric: a name in `metrics.METRICS`.
        chat: whether the prompt is put into a chat template.
        stop_at_newline: only the answer's first line is scored.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool
    stop_at_newline: bool

    def split(self, context: str, question: str) -> tuple[str, str]:
        """Return the prompt in two parts, the first up to and including the context."""
        before, behind = self.prompt.split("{context}")
        return before + context, behind.replace("{input}", question)


TASKS: dict[str, Task] = {
    name: Task(**fixed)
    for name, fixed in json.loads(
        Path(__file__).with_name("longbench.json").read_text(encoding="utf-8")
    )["tasks"].items()
}


HUB_NAME, HUB_FILE = "zai-org/LongBench", "data.zip"
"""Where the benchmark's authors publish its files."""


def open_archive() -> zipfile.Path:
    """Return the folder of all tasks' files in the hub's archive, cached or downloaded.

    Raises:
        DataError: the archive cannot be had or cannot be read.
    """
    try:
        path = download(HUB_NAME, HUB_FILE, "dataset")
    except NotOnHubError as error:
        raise DataError(
            f"cannot get the {HUB_FILE} of {HUB_NAME!r} from the hub: {error}; give the folder "
            "that holds LongBench's files"
        ) from None
    try:
        return zipfile.Path(path, "data/")
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}; download it again") from None


def load_longbench(
    folder: Path | zipfile.Path, task: str, limit: int | None = None
) -> list[Sample]:
    """Return the samples of a task, all or the first ones.

    Of a sample, `context` and `question` joined are exactly the official prompt. Its facts are the
    benchmark's `official_length` (in words; of Chinese, in characters) and `id`.

    Args:
        folder: where the official files are, such as what `open_archive` returns.
        task: a name in `TASKS`.
        limit: how many samples at most.

    Raises:
        DataError: there is no such task or file, or a line cannot be used.
        MetricError: a package that scores the task is missing.
    """
    if task not in TASKS:
        raise DataError(f"LongBench has no task {task!r}; choose one of: {', '.join(TASKS)}")
    path = folder / f"{task}.jsonl"
    if not path.exists():
        raise DataError(_what_is_there(folder, path.name))
    find_metric(TASKS[task].metric).check_packages()
    return [_sample(task, line) for line in read_lines(path, limit)]


def _what_is_there(folder: Path | zipfile.Path, name: str) -> str:
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}; give the one that holds LongBench's files"
    found = [task for task in TASKS if (folder / f"{task}.jsonl").exists()]
    there = f"it has the tasks: {', '.join(found)}" if found else "it has none of LongBench's files"
    return f"the folder {str(folder)!r} has no {name!r}; {there}"


def _sample(name: str, line: Line) -> Sample:
    task = TASKS[name]
    told = line.text("dataset", name)
    if told != name:
        raise line.error(f"is a sample of {told!r}, not of {name!r}")
    context, question = task.split(line.text("context"), line.text("input"))
    answers, classes = line.texts("answers"), _classes(line)
    try:
        find_metric(task.metric).check(answers, classes)
    except MetricError as error:
        raise line.error(f"cannot be scored: {error}") from None
    return Sample(
        task=name,
        index=line.number - 1,
        context=context,
        question=question,
        answers=answers,
        metric=task.metric,
        max_new_tokens=task.max_new_tokens,
        chat=task.chat,
        classes=classes,
        stop_at_newline=task.stop_at_newline,
        facts={"official_length": line.count("length"), "id": line.text("_id")},
    )


def _classes(line: Line) -> tuple[str, ...]:
    """Return all classes; the field is null, or empty, in tasks that have none."""
    empty = line.fields.get("all_classes", False) in (None, [])
    return () if empty else line.texts("all_classes")
