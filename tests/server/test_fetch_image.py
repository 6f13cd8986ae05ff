"""Images by URL: allowed hosts and folders only, and no way into the server's own network."""

import functools
import http.server
import itertools
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jinfer.server.http import fetch_image as fetching
from jinfer.server.http.fetch_image import fetch_image, is_public, read_image_file
from jinfer.server.http.http_errors import ApiError

DATA = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
LIMIT = 4096


class Site:
    """An HTTP server on this machine, which counts connections and requests."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        self.answers: dict[str, Callable[[Any], None]] = {"/a.png": respond()}
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.hits.append(self.path)
                site.answers.get(self.path, respond(404))(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Counting(http.server.ThreadingHTTPServer):
            def verify_request(self, *_: Any) -> bool:
                site.connections += 1
                return True

        self.connections = 0
        self.server = Counting(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def url(self, path: str = "/a.png", host: str = "images.test") -> str:
        return f"http://{host}:{self.port}{path}"


def respond(status: int = 200, body: bytes = DATA, **headers: str) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.fixture
def sites() -> Iterator[Callable[[], Site]]:
    made: list[Site] = []

    def make() -> Site:
        made.append(Site())
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that resolve to given addresses; the address of this machine counts as public."""
    known = {"images.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    original = socket.getaddrinfo

    def resolve(host: str, port: int, *rest: Any, **more: Any) -> Any:
        if (addresses := known.get(host)) is None:
            return original(host, port, *rest, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    return known


def fetched(site: Site, path: str = "/a.png", *more: str) -> bytes:
    return fetch_image(site.url(path), (f"images.test:{site.port}", *more), LIMIT, "url")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    assert caught.value.param == "url"
    assert "\n" not in caught.value.message
    return caught.value.message


def test_an_image_of_an_allowed_host(sites: Any, named: Any) -> None:
    site = sites()
    assert fetched(site) == DATA
    assert site.hits == ["/a.png"]


def test_the_query_and_unusual_characters_are_sent(sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/%C3%BC%20a.png?size=1&x=%C3%A4"] = respond()
    assert fetched(site, "/ü%20a.png?size=1&x=ä") == DATA


@pytest.mark.parametrize(
    "hosts",
    [(), ("test",), ("images.test",), ("mages.test",), ("*.test",), ("images.test.evil.test",)],
)
def test_other_hosts_get_no_connection(hosts: tuple[str, ...], sites: Any, named: Any) -> None:
    site = sites()
    reason = refusal(lambda: fetch_image(site.url(), hosts, LIMIT, "url"))
    assert "--image-hosts" in reason
    assert site.connections == 0


@pytest.mark.parametrize(
    "form",
    [
        "http://images.test:{port}@other.test:{port}/a.png",
        "http://images.test@other.test:{port}/a.png",
        "http://other.test:{port}\\@images.test:{port}/a.png",
        "http://images.test.:{port}/a.png",
        "http://images.test:{port}:{port}/a.png",
        "http://images.test:{port} @other.test/a.png",
        "http://images.test:99999/a.png",
        "http://images.test:{port}\t/a.png",
        "http://[::1/a.png",
        "http:///a.png",
        "//images.test:{port}/a.png",
        "ftp://images.test:{port}/a.png",
        "gopher://images.test:{port}/a.png",
        "file:///etc/passwd",
        "images.test/a.png",
        "",
    ],
)
def test_confusing_urls_get_no_connection(form: str, sites: Any, named: Any) -> None:
    site = sites()
    hosts = (f"images.test:{site.port}", "images.test")
    refusal(lambda: fetch_image(form.format(port=site.port), hosts, LIMIT, "url"))
    assert site.connections == 0


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "0.0.0.0"),
        *("169.254.169.254", "100.64.0.1", "100.127.255.255", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0"),
        *("fc00::1", "fd12::1", "fec0::1", "ff02::1", "2002:7f00:1::", "64:ff9b::7f00:1"),
        *("64:ff9b:1::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "2001:db8::1"),
        *("2001::1", "100::1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450::200e"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_a_listed_host_with_a_private_address_gets_no_connection(sites: Any) -> None:
    site = sites()
    hosts = (f"127.0.0.1:{site.port}", f"localhost:{site.port}", f"[::1]:{site.port}")
    for host in ("127.0.0.1", "localhost"):
        url = site.url(host=host)
        assert "not public" in refusal(functools.partial(fetch_image, url, hosts, LIMIT, "url"))
    assert site.connections == 0


def test_one_private_address_among_several_refuses_all(sites: Any, named: Any) -> None:
    site = sites()
    named["images.test"] = ["127.0.0.1", "10.0.0.1"]
    assert "not public" in refusal(lambda: fetched(site))
    assert site.connections == 0


def test_the_name_is_resolved_once(
    sites: Any, named: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the second answer of the name server would be another address."""
    site, lookups = sites(), itertools.count()
    resolve = socket.getaddrinfo

    def rebinding(host: str, *rest: Any, **more: Any) -> Any:
        if host == "images.test" and next(lookups):
            raise AssertionError("the name was resolved again")
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert fetched(site) == DATA


def test_redirects_are_followed_to_allowed_hosts(sites: Any, named: Any) -> None:
    first, second = sites(), sites()
    first.answers["/to"] = respond(302, location=second.url(host="other.test"))
    first.answers["/near"] = respond(301, location="a.png")
    assert fetched(first, "/to", f"other.test:{second.port}") == DATA
    assert fetched(first, "/near") == DATA
    assert second.hits == ["/a.png"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_does_not_reach_it(status: int, sites: Any, named: Any) -> None:
    first, secret = sites(), sites()
    for location in (secret.url(host="other.test"), secret.url(host="127.0.0.1")):
        first.answers["/to"] = respond(status, location=location)
        assert "--image-hosts" in refusal(lambda: fetched(first, "/to"))
    assert secret.connections == 0


def test_a_redirect_to_a_listed_host_that_became_private(sites: Any, named: Any) -> None:
    first, secret = sites(), sites()
    first.answers["/to"] = respond(302, location=secret.url(host="other.test"))
    named["other.test"] = ["192.168.0.9"]
    assert "not public" in refusal(lambda: fetched(first, "/to", f"other.test:{secret.port}"))
    assert secret.connections == 0


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://images.test/a", "data:,a"])
def test_a_redirect_to_another_scheme(location: str, sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/to"] = respond(302, location=location)
    assert "neither http: nor https:" in refusal(lambda: fetched(site, "/to"))


def test_redirects_end(sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/to"] = respond(302, location="/to")
    assert "redirects" in refusal(lambda: fetched(site, "/to"))
    assert len(site.hits) == 4


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500, 503])
def test_other_statuses(status: int, sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/a.png"] = respond(status, b"")
    assert f"status {status}" in refusal(lambda: fetched(site))


def test_a_size_that_is_announced(sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/a.png"] = respond(body=b"", content_length=str(LIMIT + 1))
    assert f"more than {LIMIT} bytes" in refusal(lambda: fetched(site))


def test_a_body_that_ends_early(sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/a.png"] = respond(content_length=str(len(DATA) + 1))
    assert "ends early" in refusal(lambda: fetched(site))


def test_a_size_that_is_not_announced(sites: Any, named: Any) -> None:
    site, sent = sites(), []

    def endless(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(10_000):
                handler.wfile.write(b"x" * 4096)
                sent.append(4096)
        except OSError:
            pass

    site.answers["/a.png"] = endless
    assert f"more than {LIMIT} bytes" in refusal(lambda: fetched(site))
    time.sleep(0.1)
    assert sum(sent) < 32 << 20


@pytest.mark.parametrize("part", ["head", "body", "nothing"])
def test_slow_servers_end_at_the_deadline(
    part: str, sites: Any, named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites()
    monkeypatch.setattr(fetching, "SECONDS", 0.5)

    def slow(handler: Any) -> None:
        begin = {"head": b"HTTP/1.1 200 OK\r\nx: ", "body": b"HTTP/1.1 200 OK\r\n\r\n"}
        try:
            handler.wfile.write(begin.get(part, b""))
            for _ in range(100):
                handler.wfile.write(b"x" if part != "nothing" else b"")
                time.sleep(0.05)
        except OSError:
            pass

    site.answers["/a.png"] = slow
    begun = time.monotonic()
    assert "longer than 0.5 seconds" in refusal(lambda: fetched(site))
    assert time.monotonic() - begun < 2


def test_a_host_that_does_not_answer(named: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, hosts = f"http://images.test:{port}/a.png", (f"images.test:{port}",)
    assert "downloaded" in refusal(lambda: fetch_image(url, hosts, LIMIT, "url"))


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_garbage_instead_of_http(answer: bytes, sites: Any, named: Any) -> None:
    site = sites()
    site.answers["/a.png"] = lambda handler: handler.wfile.write(answer)
    assert "downloaded" in refusal(lambda: fetched(site))


@pytest.mark.parametrize("name", ["images.test", "other.test"])
def test_https_checks_the_certificate(
    name: str, sites: Any, named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites()
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 1 -subj /CN=x"
    made = subprocess.run(
        [*make.split(), "-addext", f"subjectAltName=DNS:{name}"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    site.server.socket = context.wrap_socket(site.server.socket, server_side=True)
    url = site.url().replace("http:", "https:")
    hosts = (f"images.test:{site.port}",)
    assert "downloaded" in refusal(lambda: fetch_image(url, hosts, LIMIT, "url"))
    assert site.hits == []  # nobody has signed it
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    if name == "images.test":
        assert fetch_image(url, hosts, LIMIT, "url") == DATA
    else:
        assert "downloaded" in refusal(lambda: fetch_image(url, hosts, LIMIT, "url"))


def test_files_below_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b c.png"):
        (folder / name).write_bytes(DATA)
    read = functools.partial(read_image_file, folder=str(folder), max_bytes=LIMIT, param="url")
    assert read(f"file://{folder}/a.png") == DATA
    assert read(f"file://localhost{folder}/sub/b%20c.png") == DATA
    assert read(f"file://{folder}/sub/../a.png") == DATA
    assert "larger than 10 bytes" in refusal(lambda: read(f"file://{folder}/a.png", max_bytes=10))
    assert "cannot be read" in refusal(lambda: read(f"file://{folder}/none.png"))
    assert "not a regular file" in refusal(lambda: read(f"file://{folder}/sub"))


def test_files_elsewhere(tmp_path: Path) -> None:
    folder, other = tmp_path / "img", tmp_path / "img2"
    for each in (folder, other):
        each.mkdir()
        (each / "a.png").write_bytes(DATA)
    (folder / "link.png").symlink_to(other / "a.png")
    urls = [
        f"file://{other}/a.png",  # a longer name
        f"file://{folder}/../img2/a.png",
        f"file://{folder}/%2e%2e/img2/a.png",
        f"file://{folder}/link.png",
        f"file://elsewhere{folder}/a.png",
        "file:///etc/passwd",
        "file:///proc/self/environ",
        f"file://{folder}/a.png?x",
        "file://a.png",
        f"file://{folder}/a%00.png",
        "file:",
    ]
    for url in urls:
        reason = refusal(functools.partial(read_image_file, url, str(folder), LIMIT, "url"))
        assert "cannot be read" not in reason  # nothing is learned of other files
    url = f"file://{folder}/a.png"
    assert "--image-folder" in refusal(lambda: read_image_file(url, None, LIMIT, "url"))
