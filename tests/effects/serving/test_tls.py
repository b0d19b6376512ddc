"""HTTPS, and what is wrong with its files."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from websockets.frames import Frame, Opcode

from minfer.effects.cli.main import main
from minfer.effects.serving.wire.tls import Tls
from minfer.values.checks import ConfigError
from tests.effects.serving.test_server import process
from tests.effects.serving.transports.test_socket_floods import HANDSHAKE

WORD = "of-a-test"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="makes the files")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certified(tmp_path_factory.mktemp("tls"))


def certified(folder: Path) -> Path:
    """A folder with a certificate, its key, and the key under a password."""
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
    make += "-days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 "
    lock = "openssl ec -aes128 -in key.pem -out locked.pem -passout pass:" + WORD
    for command in (f"{make} -keyout key.pem -out cert.pem", lock):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.long
@needs_openssl
@pytest.mark.parametrize("api_servers", ["0", "2"])
def test_https_for_clients_with_a_certificate(files: Path, api_servers: str) -> None:
    cert, key = files / "cert.pem", files / "locked.pem"
    options = ["--dry-run", "--api-processes", api_servers, "--ssl-certfile", str(cert)]
    options += ["--ssl-keyfile", str(key), "--ssl-ca-certs", str(cert)]
    with process(*options, MINFER_SSL_KEYFILE_PASSWORD=WORD) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            httpx.get(f"{url}/version", verify=trusting)
        trusting.load_cert_chain(cert, files / "key.pem")
        assert httpx.get(f"{url}/version", verify=trusting).status_code == 200


class Records:
    """A client's TLS connection, of which several records are sent at once."""

    def __init__(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.come, self.go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.come, self.go)
        self.until(self.tls.do_handshake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def until(self, action: Callable[[], Any]) -> Any:
        """What it returns once enough bytes have come."""
        while True:
            try:
                return action()
            except ssl.SSLWantReadError:
                self.socket.sendall(self.go.read())
                data = self.socket.recv(2**16)
                assert data, "the server closed the connection"
                self.come.write(data)

    def send(self, *records: bytes) -> None:
        for record in records:
            self.tls.write(record)
        self.socket.sendall(self.go.read())

    def hear(self, text: bytes, count: int) -> None:
        """Read until a text has come `count` times."""
        data = b""
        while data.count(text) < count:
            received = self.until(lambda: self.tls.read(2**16))
            assert received, data
            data += received


@pytest.mark.long
@needs_openssl
def test_a_websocket_reads_all_records_that_come_at_once(files: Path) -> None:
    """And writes nothing to the log when what comes is no frame."""
    cert, key = files / "cert.pem", files / "key.pem"
    options = ["--dry-run", "--api-processes", "0", "--ssl-certfile", str(cert)]
    upgrade = HANDSHAKE.replace(b"Host: x", b"Host: 127.0.0.1")
    message = Frame(Opcode.TEXT, b"{}").serialize(mask=True)
    with ExitStack() as stack:
        server = process(*options, "--ssl-keyfile", str(key))
        running, url = stack.enter_context(server)
        port = int(url.rsplit(":", 1)[1])
        first, second = (stack.enter_context(Records(port)) for _ in range(2))
        first.send(upgrade)
        second.send(upgrade)
        first.hear(b" 101 ", 1)
        first.send(*[message] * 20)
        first.hear(b'"status": 400', 20)
        second.send(b"\x81\x02{}" * 2000)
        second.send(*[b"\x81\x02{}" * 2000] * 9)
        context = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{url}/health", verify=context).status_code == 200
        running.terminate()
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()


@needs_openssl
def test_what_is_wrong_is_named_before_anything_is_loaded(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key, locked = (str(files / f"{name}.pem") for name in ("cert", "key", "locked"))
    Tls(certfile=cert, keyfile=key, ca_certs=cert).check()
    Tls(certfile=cert, keyfile=locked, password=WORD).check()
    Tls().check()
    for wrong, message in (
        (Tls(certfile="/no/such"), "--ssl-certfile /no/such: No such file"),
        (Tls(certfile=cert), "--ssl-certfile"),  # there is no key in it
        (Tls(certfile=cert, keyfile=locked), "--ssl-keyfile-password"),
        (Tls(certfile=cert, keyfile=key, ca_certs=key), f"--ssl-ca-certs {key}"),
        (Tls(keyfile=key), "--ssl-keyfile does nothing without --ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong.check()
    arguments = ["serve", "--dry-run", "--ssl-certfile", cert, "--ssl-keyfile", locked]
    assert main([*arguments, "--ssl-keyfile-password", "guess"]) == 2
    _, err = capfd.readouterr().err.splitlines()
    assert err.startswith("minfer: --ssl-certfile")
    assert "guess" not in err
