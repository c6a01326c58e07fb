from pages import pages


def check_even():
    assert pages([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


def check_rest():
    assert pages([1, 2, 3], 2) == [[1, 2], [3]]


def check_nothing():
    assert pages([], 3) == []


def check_size():
    try:
        pages([1], 0)
    except ValueError:
        return
    raise AssertionError("a size of 0 was taken")
