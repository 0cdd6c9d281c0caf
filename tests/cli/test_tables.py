"""Tables on narrow terminals: what is left out, and that nothing is cut short."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.cli.tables import echo_sentence, print_table

ROW = ["4096", "some words that wrap where a line ends", "16.5%"]


def printed(
    capsys: pytest.CaptureFixture[str], columns: list[str], width: int, spare: tuple[int, ...] = ()
) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        print_table(columns, [ROW], spare=spare)
    return capsys.readouterr().out.splitlines()


def test_a_table_that_cannot_be_narrower_is_folded_and_keeps_its_numbers_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = [">tokens of a sequence", ">words", ">share of the peak"]
    first, *others = printed(capsys, columns, 44)
    assert first == "4096"
    assert max(map(len, others)) <= 44
    assert others[:2] == ["  words some words that wrap where a line", "  ends, share of the peak 16.5%"]
    assert " ".join(others[2:]) == (
        "each row has lines of its own, the first its tokens of a sequence, as there are 44 columns"
    )
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe
    print_table([">tokens of a sequence " * 9, ">words", ">share"], [ROW])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_folded_row_with_a_number_begins_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, [">#", "words", ">share of the peak"], 44)[0] == " ".join(ROW[:2])


def test_errors_and_leads_have_lines_of_whole_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for arguments in (["profiles", "show", "nope"], ["search", "--nope"], ["plan", "-b", "1", "-b", "2"], ["search"]):
        shown = CliRunner().invoke(main, arguments, prog_name="commlayer")
        assert shown.exit_code == 2
        assert max(map(len, shown.stderr.splitlines())) <= 60, shown.stderr
    echo_sentence(" and more words" * 5, lead="TP8 " * 20)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_text_that_wraps_takes_several_lines_where_no_column_is_spare(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [">tokens", "~words", ">share"], 40)
    assert max(map(len, lines)) <= 40
    assert "16.5%" in lines[2]
    assert len(lines) > 3


def test_spare_columns_are_left_out_and_named_before_text_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [">tokens", "~words", ">share"], 54, spare=(2, 0))
    assert lines[2].split() == " ".join(ROW[:2]).split()
    assert lines[3:] == ["left out, as there are 54 columns: share"]


def test_a_sentence_has_lines_of_whole_words_on_a_terminal_and_is_one_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "note: " + "a word, and --another-word " * 6 + "x" * 90
    monkeypatch.delenv("COLUMNS", raising=False)
    echo_sentence(sentence, err=True)
    assert capsys.readouterr().err == f"{sentence}\n"
    monkeypatch.setenv("COLUMNS", "60")
    echo_sentence(sentence, err=True)
    *lines, last = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join([*lines, last]) == sentence
    assert last == "x" * 90  # no word is cut
