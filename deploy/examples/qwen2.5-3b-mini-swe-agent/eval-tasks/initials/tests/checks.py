from initials import initials


def check_case():
    assert initials("ada lovelace") == "A.L."


def check_spaces():
    assert initials("  Grace   Brewster Hopper ") == "G.B.H."


def check_empty():
    assert initials("") == ""
