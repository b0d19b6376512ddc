"""HTTPS, and what is wrong with its files."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from minfer.effects.cli.main import main
from minfer.effects.serving.wire.tls import Tls
from minfer.values.checks import ConfigError
from tests.effects.serving.test_server import process

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
@pytest.mark.parametrize("fronts", ["0", "2"])
def test_https_for_clients_with_a_certificate(files: Path, fronts: str) -> None:
    cert, key = files / "cert.pem", files / "locked.pem"
    options = ["--dry-run", "--api-processes", fronts, "--ssl-certfile", str(cert)]
    options += ["--ssl-keyfile", str(key), "--ssl-ca-certs", str(cert)]
    with process(*options, MINFER_SSL_KEYFILE_PASSWORD=WORD) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            httpx.get(f"{url}/version", verify=trusting)
        trusting.load_cert_chain(cert, files / "key.pem")
        assert httpx.get(f"{url}/version", verify=trusting).status_code == 200


@needs_openssl
def test_what_is_wrong_is_named_before_anything_is_loaded(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cert, key, locked = (str(files / f"{one}.pem") for one in ("cert", "key", "locked"))
    Tls(certfile=cert, keyfile=key, ca_certs=cert).check()
    Tls(certfile=cert, keyfile=locked, password=WORD).check()
    Tls().check()
    for wrong, why in (
        (Tls(certfile="/no/such"), "--ssl-certfile /no/such: No such file"),
        (Tls(certfile=cert), "--ssl-certfile"),  # there is no key in it
        (Tls(certfile=cert, keyfile=locked), "--ssl-keyfile-password"),
        (Tls(certfile=cert, keyfile=key, ca_certs=key), f"--ssl-ca-certs {key}"),
        (Tls(keyfile=key), "--ssl-keyfile does nothing without --ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=why):
            wrong.check()
    arguments = ["serve", "--dry-run", "--ssl-certfile", cert, "--ssl-keyfile", locked]
    assert main([*arguments, "--ssl-keyfile-password", "guess"]) == 2
    _, err = capfd.readouterr().err.splitlines()
    assert err.startswith("minfer: --ssl-certfile")
    assert "guess" not in err
