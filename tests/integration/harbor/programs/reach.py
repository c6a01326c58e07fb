"""Whom a sandbox reaches, as JSON on stdout: of each address what was answered, or what went wrong. Arguments: NAME=URL…; of
`udp` it is only whether a packet may leave; `marked` sets the mark by which the sidecar's own connections pass."""

import json
import socket
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

MARK = 114514


def answered(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def sent(url):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to:
        to.connect((urlsplit(url).hostname, urlsplit(url).port))
        to.send(b"x")
    return "sent"


def marked(url):
    with socket.socket() as to:
        to.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        to.settimeout(20)
        to.connect((urlsplit(url).hostname, urlsplit(url).port))
        to.send(b"GET / HTTP/1.0\r\n\r\n")
        return to.recv(12).decode()


found = {}
for argument in sys.argv[1:]:
    name, _, url = argument.partition("=")
    try:
        found[name] = {"udp": sent, "marked": marked}.get(name, answered)(url)
    except OSError as error:
        found[name] = type(error).__name__
print(json.dumps(found))
