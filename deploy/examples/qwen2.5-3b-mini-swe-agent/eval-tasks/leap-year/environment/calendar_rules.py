def is_leap(year):
    """Whether February has 29 days in this year."""
    return year % 4 == 0
