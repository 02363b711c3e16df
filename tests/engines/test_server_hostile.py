"""What a hostile client can send to `ktmoe serve`: it is told what is wrong, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import time
from urllib.parse import urlsplit

import commands
import pytest
from listening import addresses
from random_requests import CHAT, FIRST, RESPONSE, TEXT, made
from raw_http import CLOSE, HOST, answers, connect, descriptors, exchange, message, post, received, resident

from ktmoe import synthetic

#: MiB that all requests of this module may leave behind.
LEFT = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthetic.write_chat_model(folder, seed=3)
    with commands.server(folder, tmp_path_factory.mktemp("temporary"), "--context", "200") as started:
        yield started


@pytest.fixture(scope="module")
def address(server):
    """Of the server, which is as it was in the end."""
    found, pid = urlsplit(server.url), server.process.pid
    for path, body in FIRST.items():
        assert exchange(found, post(path, json.dumps(body).encode()))[0][0] == 200
    before, files = resident(pid), descriptors(pid)
    yield found
    assert exchange(found, post(TEXT, b'{"prompt": "x", "max_tokens": 1}'))[0][0] == 200
    deadline = time.monotonic() + commands.PATIENCE
    while descriptors(pid) > files:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert resident(pid) - before < LEFT
    assert "Traceback" not in server.errors.read_text()


def test_where_it_listens(server):
    assert addresses(server.process.pid)
    assert all(address.is_loopback for address in addresses(server.process.pid))


GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = b"POST %s HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
LENGTH = b"POST /v1/completions HTTP/1.1\r\n" + HOST + CLOSE + b"Content-Length: "
#: Bytes, and the statuses of the answers.
BYTES = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x00\r\n\r\n", [400]),
    "no HTTP": (b"hello\r\n\r\n", [400]),
    "HTTP/0.9": (b"GET /health\r\n\r\n", [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [404, 400]),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", [400]),
    "two Hosts": (GET + HOST + b"\r\n", [400]),
    "a header of 64 KB": (GET + CLOSE + b"X: " + b"a" * 65_536 + b"\r\n\r\n", [431]),
    "10,000 headers": (GET + CLOSE + b"X: a\r\n" * 10_000 + b"\r\n", [431]),
    "a path of 20 KB": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [431]),
    "a control character": (GET + b"X: \0\r\n\r\n", [400]),
    "a path that is no ASCII": ("GET /é HTTP/1.1\r\n".encode() + HOST + b"\r\n", [400]),
    "an absolute URI": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [404]),
    "CONNECT": (b"CONNECT evil.example:80 HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [404]),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [404]),
    "a path upwards": (b"GET /v1/../../etc/passwd HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [404]),
    "escapes in a path": (b"GET /%2e%2e/%ff%00%0a HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [404]),
    "another method": (b"FOO /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", [405]),
    "an upgrade": (GET + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n", [200]),
    "ten requests at once": ((GET + b"\r\n") * 9 + GET + CLOSE + b"\r\n", [200] * 10),
    "no HTTP after a request": (GET + b"\r\n\0\r\n\r\n", [200, 400]),
    "a chunk without a size": (CHUNKED % TEXT.encode() + b"\r\nZZ\r\n", [400]),
    "the same where nothing is": (CHUNKED % b"/x" + b"\r\nZZ\r\n", [400]),
    "a negative chunk": (CHUNKED % TEXT.encode() + b"\r\n-1\r\n", [400]),
    "a chunk's long extension": (CHUNKED % TEXT.encode() + b"\r\n5;" + b"a" * 20_000, [431]),
    "another encoding": (LENGTH.replace(b"Content-Length", b"Transfer-Encoding") + b"gzip\r\n\r\n", [501]),
    "a negative length": (LENGTH + b"-1\r\n\r\n", [400]),
    "two lengths": (LENGTH + b"1\r\nContent-Length: 2\r\n\r\nab", [400]),
    "a length of 100 GB": (LENGTH + b"99999999999\r\nExpect: 100-continue\r\n\r\n", [413]),
    "a length that is too short": (LENGTH + b"5\r\n\r\n" + b'{"prompt": "x", "max_tokens": 1}', [400]),
    "another site": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n" + CLOSE + b"\r\n", [403]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", BYTES)
def test_bytes(server, address, name):
    """At most a line on stderr, without a traceback."""
    before = len(server.errors.read_text().splitlines())
    data, statuses = BYTES[name]
    found = exchange(address, data)
    assert [status for status, _ in found] == statuses
    for status, body in found:
        assert status == 200 or message(body)
    assert len(server.errors.read_text().splitlines()) - before <= 1


def test_methods_that_are_allowed(address):
    """405 says them."""
    with connect(address) as client:
        client.sendall(b"DELETE /v1/models HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
        assert b"\r\nallow: GET\r\n" in received(client)


def test_a_body_without_a_length(address):
    """It is refused once it is too large; what follows is not kept."""
    with connect(address) as client:
        client.sendall(CHUNKED % TEXT.encode() + b"\r\n")
        for _ in range(12):
            client.sendall(b"f4240\r\n" + b" " * 1_000_000 + b"\r\n")
        client.sendall(b"0\r\n\r\n" + GET + CLOSE + b"\r\n")
        assert [status for status, _ in answers(received(client))] == [413, 200]


#: Bodies of nearly 10 MB that are much larger once they are read.
LARGE = {
    "lists": b"[" + b"[]," * 3_000_000 + b"[]]",
    "objects": b'{"user": [' + b"{}," * 3_000_000 + b"{}]}",
    "fields": b"{" + b",".join(b'"%d":1' % number for number in range(800_000)) + b"}",
    "a text": b'{"prompt": "' + b"a" * 9_900_000 + b'"}',
    "spaces": b" " * 9_990_000,
    "digits": b'{"temperature": 1.' + b"1" * 9_900_000 + b"}",
    "an integer": b'{"seed": ' + b"1" * 9_900_000 + b"}",
    "stops": json.dumps(FIRST[CHAT] | {"stop": ["a"] * 10**6}).encode(),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body(server, address, name):
    """The memory that it takes is not a multiple of its size for long, nor does it take long."""
    pid = server.process.pid
    before = _seconds(pid)
    ((status, body),) = exchange(address, post(TEXT, LARGE[name]))
    assert (status, bool(message(body))) == (400, True)
    assert _seconds(pid) - before < 1.5


def _seconds(pid: int) -> float:
    """Of CPUs, that a process has taken."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "gpt2",
    "openai/gpt-oss-20b",
    "tiny@main",
    "tiny:x.gguf",
    "./tiny",
    "TINY",
    "",
    1,
    {},
]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSE, "/load_model"])
def test_names_of_other_models(address, path):
    for name in [*NAMES, None, [], True]:
        for stream in (False, True):
            body = FIRST.get(path, {}) | {"model": name, "stream": stream}
            ((status, body),) = exchange(address, post(path, json.dumps(body).encode()))
            assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
            assert message(body)


@pytest.mark.smoke
def test_random_requests(server, address, repeat):
    """Each is answered or refused, never a fault of the server's."""
    client = http.client.HTTPConnection(address.hostname, address.port, timeout=commands.PATIENCE)
    for number in repeat("random requests to the server", 10_000, least=100):
        path, body = made(number)
        client.request("POST", path, body, {"Content-Type": "application/json"})
        response = client.getresponse()
        text, where = response.read(), (number, body[:300])
        assert response.status in (200, 400, 404), (where, text[:500])
        if response.status != 200:
            assert message(text), where
        repeat.most("MiB", resident(server.process.pid))
    client.close()
    lines = server.errors.read_text().splitlines()
    assert [line for line in lines if line.startswith("/v1/")] == []
