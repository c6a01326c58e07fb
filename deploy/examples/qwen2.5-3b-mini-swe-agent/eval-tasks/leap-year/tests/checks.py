from calendar_rules import is_leap


def check_ordinary():
    assert is_leap(2024) and not is_leap(2023)


def check_centuries():
    assert not is_leap(1900) and not is_leap(2100)


def check_fourth_centuries():
    assert is_leap(2000) and is_leap(1600)
