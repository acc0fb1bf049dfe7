"""Unprintable characters of text that others have written."""

from jaxmux.printable import escaped, spaced

TEXT = "a\x1b[2J\u2028\ud800 é\n"


def test_escapes_take_the_place_of_what_a_terminal_obeys():
    assert escaped(TEXT) == "a\\x1b[2J\\u2028\\ud800 é\\n"
    assert escaped(TEXT, keep="\n") == "a\\x1b[2J\\u2028\\ud800 é\n"


def test_spaces_leave_one_line():
    assert spaced(TEXT) == "a [2J   é "
