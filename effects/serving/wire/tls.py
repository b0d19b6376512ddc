"""HTTPS: its files are checked before a model is loaded; errors name the wrong one."""

import ssl
from typing import Any

from attrs import frozen

from minfer.values.checks import ConfigError


@frozen(kw_only=True)
class Tls:
    """The files for HTTPS; without files the server speaks HTTP."""

    certfile: str = ""
    keyfile: str = ""
    password: str = ""  # of the key
    ca_certs: str = ""  # of those that signed the certificates that clients must have

    @property
    def enabled(self) -> bool:
        """Whether the server speaks HTTPS."""
        return bool(self.certfile)

    def check(self) -> None:
        """Raise ConfigError if these files cannot be used together."""
        if not self.certfile:
            dependent_options = (
                ("--ssl-keyfile", self.keyfile),
                ("--ssl-keyfile-password", self.password),
                ("--ssl-ca-certs", self.ca_certs),
            )
            for option, value in dependent_options:
                if value:
                    raise ConfigError(f"{option} does nothing without --ssl-certfile")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        used_options = f"--ssl-certfile {self.certfile}"
        used_options += f" --ssl-keyfile {self.keyfile}" if self.keyfile else ""
        try:
            # Without a password, the terminal would prompt for that of an encrypted key.
            context.load_cert_chain(
                self.certfile, self.keyfile or None, lambda: self.password
            )
            if self.ca_certs:
                used_options = f"--ssl-ca-certs {self.ca_certs}"
                context.load_verify_locations(self.ca_certs)
        except OSError as error:  # that of ssl is one
            reason = f"{used_options}: {error.strerror or error}"
            raise ConfigError(
                f"{reason}; give PEM files, and a key's --ssl-keyfile-password"
            ) from None

    def settings(self) -> dict[str, Any]:
        """The settings for uvicorn."""
        if not self.enabled:
            return {}
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile or None,
            "ssl_keyfile_password": self.password or None,
            "ssl_ca_certs": self.ca_certs or None,
            "ssl_cert_reqs": ssl.CERT_REQUIRED if self.ca_certs else ssl.CERT_NONE,
        }
