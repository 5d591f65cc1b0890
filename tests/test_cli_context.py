"""`ask` and `chat` as users run them, and the options for pieces and decode budgets."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import words
from safetensors.torch import save_file
from test_cli import Outcome, assert_one_sentence, run

import pyramidkv
from pyramidkv import loading

SMALL = ["--budget", "20", "--window-size", "6", "--kernel-size", "5"]
PIECES = ["--prefill-chunk", "10"]
FEW = ["--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "document.txt"
    path.write_text(words(80))
    return path


@pytest.fixture(scope="module")
def saved(model_folder, document, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "context.safetensors"
    done = run("ask", "--model", model_folder, "--context", document, *SMALL, "--save", path)
    assert done.returncode == 0, done.stderr.decode()
    return path


def expected_answers(model_folder, questions, **settings):
    model = loading.load_model(str(model_folder))
    tokenizer = loading.load_tokenizer(str(model_folder))
    context = pyramidkv.compress_context(
        model, tokenizer, words(80), budget=20, window_size=6, kernel_size=5, **settings
    )
    return [context.ask(question, max_new_tokens=6).text for question in questions]


def test_ask_answers_every_question_saves_and_loads(model_folder, document, tmp_path):
    path, record_file = tmp_path / "c.safetensors", tmp_path / "record.json"
    questions = ["-q", "w7 w8", "-q", "w9 w3 w5"]
    done = run(
        *("ask", "--model", model_folder, "--context", document, *questions, *SMALL, *FEW),
        *("--save", path, "--output", record_file),
    )
    assert done.returncode == 0, done.stderr.decode()
    first, second = expected_answers(model_folder, ["w7 w8", "w9 w3 w5"])
    assert done.stdout.decode() == f"> w7 w8\n{first}\n> w9 w3 w5\n{second}\n"
    notes = done.stderr.decode()
    assert "80 tokens seen, 20 kept per layer, KV cache 10.2 kB of 41.0 kB" in notes
    assert notes.count("first token after") == 2
    record = json.loads(record_file.read_text())
    assert [answer["text"] for answer in record["answers"]] == [first, second]
    assert record["context"]["kept_lengths"] == record["context"]["schedule"]
    again = run("ask", "--model", model_folder, "--load", path, *questions, *FEW)
    assert again.returncode == 0, again.stderr.decode()
    assert again.stdout == done.stdout
    assert "loaded in" in again.stderr.decode()


def test_ask_lets_the_first_question_vote(model_folder, document):
    done = run(
        *("ask", "--model", model_folder, "--context", document, "-q", "w7 w8", "--query-aware"),
        *(*SMALL, *FEW, "--prefill-chunk", 30),
    )
    assert done.returncode == 0, done.stderr.decode()
    (answer,) = expected_answers(model_folder, ["w7 w8"], question="w7 w8", prefill_chunk=30)
    assert done.stdout.decode() == f"{answer}\n"


MISTAKES = {
    "no document": ([], "neither given"),
    "both": (["--context", "D", "--load", "S"], "both given"),
    "no question": (["--context", "D", *SMALL], "give a question with -q"),
    "empty question": (["--context", "D", *SMALL, "-q", " "], "question is empty"),
    "missing document": (["--context", "/nowhere.txt", *SMALL, "-q", "w5"], "No such file"),
    "missing saved": (["--load", "/nowhere.st", "-q", "w5"], "No such file"),
    "no budget": (["--context", "D", "-q", "w5"], "either a budget"),
    "options with --load": (
        ["--load", "S", "-q", "w5", "--budget", "9", "--beta", "3", "--prefill-chunk", "4"],
        "compressed already; leave out --budget, --prefill-chunk, --beta",
    ),
    "the default's name with --load": (
        ["--load", "S", "-q", "w5", "--method", "pyramidkv"],
        "compressed already; leave out --method",
    ),
    "a later question that is too long": (
        ["--context", "D", *SMALL, "-q", "w5", "-q", "w5 " * 1100],
        "context is 1,024 tokens",
    ),
    "hardly any temperature": (
        ["--context", "D", *SMALL, "-q", "w5", "--temperature", "1e-40"],
        "at least 1e-06",
    ),
    "save over the model": (["--context", "D", *SMALL, "--save", "M"], "is a file of the model"),
    "query-aware with --load": (["--load", "S", "-q", "w5", "--query-aware"], "already"),
    "not one of ours": (["--load", "F", "-q", "w5"], "no saved context of pyramidkv"),
    "a text as context": (["--load", "D", "-q", "w5"], "no saved context"),
    "save over the document": (["--context", "D", *SMALL, "--save", "D"], "the file that is read"),
    "save into nowhere": (["--context", "D", *SMALL, "--save", "/nowhere/c.st"], "no folder"),
    "save and output the same": (
        ["--context", "D", *SMALL, "-q", "w5", "--save", "/tmp/x", "--output", "/tmp/x"],
        "name two files",
    ),
    "bytes that are no text": (["--context", "D", *SMALL, "-q", "w5 \udcff"], "is no valid text"),
    "chunk of nothing": (["--context", "D", *SMALL, "-q", "w5", "--prefill-chunk", "0"], "is 0"),
    "method without pieces": (
        ["--context", "D", "--method", "streamingllm-renumbered", *SMALL[:2], "-q", "w5", *PIECES],
        "does not support a prompt in several pieces; full, ",
    ),
    "method without decode budget": (
        ["--context", "D", "--method", "full", "-q", "w5", "--decode-budget", "40"],
        "full does not support a decode budget; streamingllm, ",
    ),
    "interval alone": (
        ["--context", "D", *SMALL, "-q", "w5", "--decode-interval", "4"],
        "without a decode budget",
    ),
    "decode budget too small": (
        ["--context", "D", *SMALL, "-q", "w5", "--decode-budget", "4"],
        "smallest possible budget is 10",
    ),
    "question longer than a piece": (
        ["--context", "D", *SMALL, "-q", "w5 " * 30, "--query-aware", "--prefill-chunk", "20"],
        "must fit into one piece",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_exit_code_two(
    mistake, model_folder, document, saved, tmp_path, capsys, monkeypatch
):
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(2)}, foreign)
    files = {"D": document, "S": saved, "F": foreign, "M": model_folder / "model.safetensors"}
    arguments, message = MISTAKES[mistake]
    arguments = [files.get(argument, argument) for argument in arguments]
    outcome = Outcome(capsys, monkeypatch, "ask", "--model", model_folder, *arguments)
    assert_one_sentence(outcome, message)
    assert document.read_text() == words(80)


def test_generate_in_pieces_and_within_a_decode_budget(model_folder, tmp_path):
    record_file = tmp_path / "record.json"
    done = run(
        *("generate", "--model", model_folder, "--prompt", words(60), *SMALL),
        *("--prefill-chunk", 16, "--decode-budget", 24, "--decode-interval", 4),
        *("--max-new-tokens", 40, "--output", record_file),
    )
    assert done.returncode == 0, done.stderr.decode()
    record = json.loads(record_file.read_text())
    assert record["schedule"] == record["kept_lengths"]
    assert sum(record["schedule"]) == 4 * 20
    assert record["prefill_chunk"] == 16
    assert (record["compression"]["decode_budget"], record["generated_tokens"]) == (24, 40)
    assert 4 * 24 <= sum(record["kept_lengths_at_end"]) <= 4 * 27


def test_chat_keeps_turns_and_takes_commands(model_folder, document, saved, tmp_path):
    path = tmp_path / "chat.safetensors"
    lines = ["w7 w8", "", "w9", "/what", "/save", f"/save {path}", "/reset", "w7 w8", "/exit", "w3"]
    done = run(
        *("chat", "--model", model_folder, "--load", saved, *FEW),
        stdin="\n".join(lines).encode(),
    )
    assert done.returncode == 0, done.stderr.decode()
    answers = done.stdout.decode().splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2] == expected_answers(model_folder, ["w7 w8"])[0]
    notes = " ".join(done.stderr.decode().split())
    # 80 + 2 question tokens + 6 answer tokens, the last of which was not read
    assert "[87 tokens seen, 27 kept per layer, KV cache 13.8 kB]" in notes
    assert "/what is no command" in notes
    assert "give the file's name" in notes
    assert "the turns are forgotten" in notes
    resumed = run("chat", "--model", model_folder, "--load", path, *FEW, stdin=b"w9\n")
    assert resumed.returncode == 0, resumed.stderr.decode()
    assert "going on after 2 turns" in resumed.stderr.decode()
    assert resumed.stdout.decode().strip() not in answers[:1]


def test_chat_goes_on_after_what_it_cannot_take(model_folder, saved, document):
    lines = b"w5 " * 1100 + b"\nw7 \xff\xfe\n/save /nowhere/c.st\nw7 w8\n"
    done = run("chat", "--model", model_folder, "--load", saved, *FEW, stdin=lines)
    assert done.returncode == 0
    assert "this line is not UTF-8 text" in done.stderr.decode()
    assert "has no folder '/nowhere'" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert "this model's context is 1,024 tokens" in " ".join(done.stderr.decode().split())
    assert done.stdout.decode().strip() == expected_answers(model_folder, ["w7 w8"])[0]


def test_chat_does_not_write_over_its_document_nor_read_it_from_the_questions(
    model_folder, document
):
    arguments = ["chat", "--model", model_folder, *SMALL, *FEW]
    lines = f"/save {document}\n".encode()
    done = run(*arguments, "--context", document, stdin=lines)
    assert "is the file that is read" in done.stderr.decode()
    assert document.read_text() == words(80)
    assert_one_sentence(run(*arguments, "--context", "-", stdin=b"w5"), "from standard input")


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_closed_standard_input_is_an_empty_one(command, model_folder, saved):
    given = ["--load", str(saved)] if command == "chat" else ["--context", "-", *SMALL, "-q", "w5"]
    main = "import sys; sys.stdin = None; from pyramidkv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, command, "--model", str(model_folder), *given],
        capture_output=True,
        check=False,
    )
    assert "Traceback" not in done.stderr.decode()
    assert done.returncode == (0 if command == "chat" else 2)


def test_names_with_brackets_are_shown_as_they_are(model_folder, document, tmp_path):
    path = tmp_path / "q[bold][].safetensors"
    done = run("ask", "--model", model_folder, "--context", document, *SMALL, "--save", path)
    assert done.returncode == 0, done.stderr.decode()
    assert f"saved as {str(path)!r}" in done.stderr.decode()


def test_ctrl_c_stops_the_answer_not_the_program(model_folder, saved):
    """On a terminal, as a user has it."""
    main, side = pty.openpty()
    # a shell may have started the tests with this signal ignored
    as_usual = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{as_usual}; from pyramidkv.cli import main; main()"]
    arguments = ["chat", "--model", str(model_folder), "--load", str(saved)]
    process = subprocess.Popen(
        [*command, *arguments, "--max-new-tokens", "900"],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    os.close(side)
    seen = ""

    def wait_for(text: str, since: int = 0, seconds: float = 120) -> int:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen[since:]:
            assert time.monotonic() < end, seen
            if select.select([main], [], [], 0.1)[0]:
                try:
                    seen += os.read(main, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(seen) from None
        return seen.index(text, since) + len(text)

    try:
        place = wait_for("> ")
        os.write(main, b"w7 w8\n")
        place = wait_for("\n", wait_for("w7 w8", place))
        time.sleep(0.5)  # it is answering now; 900 tokens take longer
        os.kill(process.pid, signal.SIGINT)
        place = wait_for("tokens seen", place, 60)
        tokens = re.findall(r"([\d,]+) tokens seen", seen[:place])[-1]
        assert int(tokens.replace(",", "")) < 900
        place = wait_for("> ", place)
        time.sleep(1)  # a signal between the prompt and the wait for a key waits for the key, too
        os.kill(process.pid, signal.SIGINT)  # at the prompt it only says how to leave
        place = wait_for("/exit or Ctrl-D leaves", place)
        os.write(main, b"/exit\n")
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(main)
