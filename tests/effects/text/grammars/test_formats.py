"""Formats allow what parsers take, and nothing else."""

import ipaddress
import re
from datetime import date, datetime
from random import Random
from urllib.parse import urlsplit

import pytest

from minfer.effects.text.grammars.formats import LIBRARY_PATTERNS, STANDARD_PATTERNS
from tests.effects.text.grammars.bundled import takes_value

EXAMPLES = {
    "date": (["2024-02-29", "2000-02-29", "0001-01-01"], ["2023-02-29", "1900-02-29"]),
    "date-time": (
        ["2024-02-29T23:59:59Z", "1985-04-12T10:15:30.52+23:59"],
        ["2024-02-30T00:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01T00:00:00"],
    ),
    "time": (["00:00:00Z", "12:30:59.1-01:00"], ["24:00:00Z", "12:30:60Z", "12:30"]),
    "duration": (
        ["P1Y2M3DT4H5M6S", "PT5M", "P3W", "P1D"],
        ["P", "PT", "P1YT", "P1Y3D", "P1W1D", "PT1H6S"],
    ),
    "uri": (
        ["https://a.org/x?y#z", "mailto:a@b.org", "urn:a:b", "file:///etc", "x://[::1]"],
        [
            "http:",
            "HTTP://a",
            "http:///x",
            "http://1.2.3.4.5",
            "http://a:99999999",
            "a/b",
        ],
    ),
    "uuid": (["0" * 8 + "-0000-4000-8000-" + "0" * 12], ["0" * 32]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1:2"], [":", "1::2::3", "12345::"]),
    "base64": (["", "YQ==", "YWI=", "YWJj"], ["YQ", "YQ=", "Y-Jj"]),
    "base64url": (["YQ==", "Y_-j"], ["YQ", "Y+Jj"]),
    "fraction": (["1/2", "-3"], ["1/0", "a"]),
    "ipv4network": (["10.0.0.0/8", "10.1.2.128/25", "1.2.3.4"], ["10.0.0.1/8", "1/33"]),
    "ipv6network": (["::/0", "2001:db8::/32", "::1"], ["::1/64"]),
    "ipv4interface": (["1.2.3.4/24", "1.2.3.4"], ["1.2.3.4/33"]),
    "ipv6interface": (["::1/128"], ["::1/129"]),
    "ipvanyaddress": (["1.2.3.4", "::1"], ["a"]),
    "ipvanynetwork": (["10.0.0.0/8", "::/0"], ["10.0.0.1/8"]),
    "ipvanyinterface": (["1.2.3.4/24", "::1/3"], ["a"]),
    "uuid4": (
        ["0" * 8 + "-0000-4000-8000-" + "0" * 12],
        ["0" * 8 + "-0000-1000-8000-" + "0" * 12],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_format_allows_what_is_one(name: str) -> None:
    right, wrong = EXAMPLES[name]
    schema = {"type": "string", "format": name}
    for text in right:
        assert takes_value(schema, text), text
    for text in wrong:
        assert not takes_value(schema, text), text


def test_every_format_has_an_example() -> None:
    formats = {f"uuid{version}" for version in range(1, 9)}
    assert {*STANDARD_PATTERNS, *LIBRARY_PATTERNS} - formats == EXAMPLES.keys() - formats


def test_every_day_of_the_calendar_is_a_date_and_no_other() -> None:
    pattern = re.compile(STANDARD_PATTERNS["date"])
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    right = date.fromisoformat(text).isoformat() == text
                except ValueError:
                    right = False
                assert (pattern.search(text) is not None) == right
    assert not pattern.search("0000-01-01")


def test_networks_are_those_that_python_takes() -> None:
    pattern = re.compile(LIBRARY_PATTERNS["ipv4network"])
    random = Random(0)
    for _ in range(3000):
        octets = [random.choice([0, 1, 64, 128, 192, 255]) for _ in range(4)]
        text = f"{'.'.join(map(str, octets))}/{random.randrange(34)}"
        try:
            right = bool(ipaddress.IPv4Network(text))
        except ValueError:
            right = False
        assert (pattern.search(text) is not None) == right


def test_examples_are_what_the_standard_library_takes() -> None:
    for text in EXAMPLES["date-time"][0]:
        assert datetime.fromisoformat(text)
    for text in EXAMPLES["uri"][0]:
        assert urlsplit(text).scheme
