from slug import slug


def check_case():
    assert slug("Hello World") == "hello-world"


def check_runs():
    assert slug("a  -  b") == "a-b"


def check_signs():
    assert slug("What? 42!") == "what-42"


def check_ends():
    assert slug(" - x - ") == "x"
