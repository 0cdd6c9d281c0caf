"""Tables on narrow terminals: what is left out, and that nothing is cut short."""

from __future__ import annotations

import pytest

from commlayer.cli.tables import echo_sentence, print_table

ROW = ["4096", "some words that wrap where a line ends", "16.5%"]


def printed(
    capsys: pytest.CaptureFixture[str], columns: list[str], width: int, spare: tuple[int, ...] = ()
) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        print_table(columns, [ROW], spare=spare)
    return capsys.readouterr().out.splitlines()


def test_a_table_that_cannot_be_narrower_keeps_its_numbers_whole(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [">tokens of a sequence", ">words", ">share of the peak"], 12)
    assert lines[2].split() == " ".join(ROW).split()
    assert len(lines) == 3


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
