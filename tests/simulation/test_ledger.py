"""The ledger of the simulation: a line a run, and their sums."""

from scripts.simulate import LEDGER, Part, entered, sums_of


def test_the_sums_of_the_ledger_are_right() -> None:
    text = LEDGER.read_text(encoding="utf-8")
    assert text.splitlines()[-1] == sums_of(text)


def test_a_run_is_entered_and_added_up() -> None:
    once = entered("# Ledger\n\n", "abc", 7, 0, Part(None, 100, 9_000, 30.0))
    twice = entered(once, "def", 107, 30, Part(110, 4, 350, 6.0))
    _, _, first, second, sums = twice.splitlines()
    assert first.endswith("| `abc` | 7 | 0 | 100 | 9000 | 0.5 | 0 |")
    assert second.endswith("| `def` | 107 | 30 | 4 | 350 | 0.1 | 1 |")
    assert sums == "| in all | | | | 104 | 9350 | 0.6 | 1 |"
    assert sums == sums_of(twice)
