import stats


def check_empty():
    assert stats.mean([]) == 0.0


def check_whole():
    assert stats.mean([2, 4]) == 3


def check_half():
    assert stats.mean([1, 2]) == 1.5
