def initials(name):
    """`ada lovelace` -> `A.L.`"""
    return "".join(word[0] + "." for word in name.split(" "))
