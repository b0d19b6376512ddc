"""The formats of texts that are enforced, beside the compiler's own.

JSON Schema says that a format is a comment unless a reader asserts it. Those that the
compiler supports are asserted, and those here; others have no effect.

`STANDARD_PATTERNS` narrows formats of the standard to what parsers take: dates are in the
calendar, from the year 1 on; a minute has 60 seconds; a URI has a host that can be one.
`LIBRARY_PATTERNS` has pydantic's formats. They apply only if the schema has no pattern:
zod uses some of the same names, with patterns of its own.
"""

from collections.abc import Iterator
from typing import Final

from minfer.effects.text.grammars.lookaheads import as_one_pattern

# Of the compiler.
COMPILER_FORMATS: Final = frozenset({"email", "hostname"})

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_CLOCK})"


# The numbers of digits keep durations within the range of Python's `timedelta`.
def _units(digits: str, large: str, middle: str, small: str) -> str:
    """Numbers of units, of which none is left out between two others."""
    ends = f"{digits}{small}"
    middles = f"{digits}{middle}(?:{ends})?"
    return f"(?:{digits}{large}(?:{middles})?|{middles}|{ends})"


_DAYS: Final = _units("[0-9]{1,6}", *"YMD")
_HOURS: Final = f"T{_units('[0-9]{1,6}', *'HMS')}"
_DURATION: Final = f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]{{1,6}}W)"

_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
_IPV6: Final = (
    "(?:"
    + "|".join(
        [
            f"(?:{_GROUP}:){{7}}{_GROUP}",
            f"(?:{_GROUP}:){{1,7}}:",
            *(
                f"(?:{_GROUP}:){{1,{7 - last}}}(?::{_GROUP}){{1,{last}}}"
                for last in range(1, 7)
            ),
            f":(?::{_GROUP}){{1,7}}",
            "::",
        ]
    )
    + ")"
)
_HEX: Final = "[0-9a-fA-F]"
_BASE64: Final = "[A-Za-z0-9+/]"
_BASE64_URL: Final = "[A-Za-z0-9_-]"

_SPECIAL_SCHEMES: Final = ("http", "https", "ws", "wss", "ftp", "file")
_UNRESERVED: Final = r"A-Za-z0-9\-._~!$&'()*+,;=:@"
_PATH: Final = f"(?:[{_UNRESERVED}/]|%{_HEX}{{2}})*"
_QUERY: Final = (
    rf"(?:\?(?:[{_UNRESERVED}/?]|%{_HEX}{{2}})*)?"
    rf"(?:#(?:[{_UNRESERVED}/?]|%{_HEX}{{2}})*)?"
)
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME: Final = rf"(?:{_LABEL}\.)*[A-Za-z](?:[A-Za-z0-9-]{{0,61}}[A-Za-z0-9])?"
_PORT: Final = "(?::(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}))?"
_USER: Final = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:]+@)?"
_AUTHORITY: Final = rf"{_USER}(?:{_NAME}|{_IPV4}|\[{_IPV6}\]){_PORT}"


def _other_schemes() -> str:
    """The schemes other than `_SPECIAL_SCHEMES`, in upper and lower case."""
    special = "|".join(
        "".join(f"[{letter.upper()}{letter}]" for letter in scheme)
        for scheme in _SPECIAL_SCHEMES
    )
    pattern = as_one_pattern(rf"^(?!(?:{special})$)[A-Za-z][A-Za-z0-9+.\-]*$")
    return pattern.removeprefix("^").removesuffix("$")


_URI: Final = (
    rf"(?:(?:https?|wss?|ftp)://{_AUTHORITY}(?:/{_PATH})?|file:///{_PATH}"
    rf"|{_other_schemes()}:"
    rf"(?://{_AUTHORITY}(?:/{_PATH})?|/?(?:(?:[{_UNRESERVED}]|%{_HEX}{{2}})(?:{_PATH}))?))"
    rf"{_QUERY}"
)


def _networks() -> Iterator[str]:
    """IPv4 networks: all bits after the prefix are zero."""
    for prefix in range(33):
        octets, bits = divmod(prefix, 8)
        octet_patterns = [_OCTET] * octets
        if bits:
            values = range(0, 256, 2 ** (8 - bits))
            octet_patterns.append(f"(?:{'|'.join(map(str, values))})")
        octet_patterns += ["0"] * (4 - len(octet_patterns))
        yield "\\.".join(octet_patterns) + f"/{prefix}"


_IPV4_NETWORK: Final = f"(?:{_IPV4}|{'|'.join(_networks())})"
# Of IPv6, those whose prefix ends with a group.
_IPV6_NETWORK: Final = (
    f"(?:{_IPV6}|::/0|"
    + "|".join(f"(?:{_GROUP}:){{{groups}}}:/{16 * groups}" for groups in range(1, 8))
    + ")"
)
_IPV4_INTERFACE: Final = f"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?"
_IPV6_INTERFACE: Final = f"{_IPV6}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?"


def _uuid(version: object = _HEX, variant: str = _HEX) -> str:
    return (
        f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"
    )


def _anchored(pattern: str) -> str:
    return f"^(?:{pattern})$"


STANDARD_PATTERNS: Final = {
    "date": _anchored(_DATE),
    "date-time": _anchored(f"{_DATE}T{_TIME}"),
    "time": _anchored(_TIME),
    "duration": _anchored(_DURATION),
    "ipv4": _anchored(_IPV4),
    "ipv6": _anchored(_IPV6),
    "uri": _anchored(_URI),
    "uuid": _anchored(_uuid()),
}
LIBRARY_PATTERNS: Final = {
    "base64": _anchored(f"(?:{_BASE64}{{4}})*(?:{_BASE64}{{2}}==|{_BASE64}{{3}}=)?"),
    "base64url": _anchored(
        f"(?:{_BASE64_URL}{{4}})*(?:{_BASE64_URL}{{2}}==|{_BASE64_URL}{{3}}=)?"
    ),
    "fraction": _anchored("-?[0-9]+(?:/[1-9][0-9]*)?"),
    "ipv4interface": _anchored(_IPV4_INTERFACE),
    "ipv4network": _anchored(_IPV4_NETWORK),
    "ipv6interface": _anchored(_IPV6_INTERFACE),
    "ipv6network": _anchored(_IPV6_NETWORK),
    "ipvanyaddress": _anchored(f"{_IPV4}|{_IPV6}"),
    "ipvanyinterface": _anchored(f"{_IPV4_INTERFACE}|{_IPV6_INTERFACE}"),
    "ipvanynetwork": _anchored(f"{_IPV4_NETWORK}|{_IPV6_NETWORK}"),
    **{
        f"uuid{version}": _anchored(_uuid(version, "[89abAB]")) for version in range(1, 9)
    },
}
