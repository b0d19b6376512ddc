"""Each tenant has its own part of the cache of templates, and only so much of it."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from minfer.effects.text import template_cache, template_rendering
from minfer.effects.text.system_messages import place_system_messages
from minfer.effects.text.template_cache import (
    MAX_TEMPLATES,
    MAX_TENANTS,
    TemplateCache,
    templates_of,
)
from minfer.effects.text.template_probe import TemplateProbe
from minfer.effects.text.template_rendering import render_template

CHAT: Any = [{"role": "user", "content": "hi"}]
SYSTEM: Any = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> TemplateCache:
    templates = TemplateCache()
    for module in (template_cache, template_rendering):
        monkeypatch.setattr(module, "TEMPLATES", templates)
    return templates


def kept(cache: TemplateCache) -> Mapping[str | None, list[str]]:
    return {tenant: list(templates) for tenant, templates in cache._tenants.items()}


def test_each_tenant_keeps_its_latest_templates(cache: TemplateCache) -> None:
    render_template("own", CHAT, {}, {})
    with templates_of("a"):
        render_template("one", CHAT, {}, {})
    compiled = cache._tenants["a"]["one"]
    for number in range(3 * MAX_TEMPLATES):
        with templates_of("b"):
            render_template(f"{{# {number} #}}", CHAT, {}, {})
    cached = kept(cache)
    assert cached[None] == ["own"]
    assert cached["a"] == ["one"]
    numbers = range(2 * MAX_TEMPLATES, 3 * MAX_TEMPLATES)
    assert cached["b"] == [f"{{# {number} #}}" for number in numbers]
    with templates_of("a"):
        render_template("one", CHAT, {}, {})
    assert cache._tenants["a"]["one"] is compiled
    with templates_of("b"):  # of equal text, and not the other tenant's
        render_template("one", CHAT, {}, {})
    assert cache._tenants["b"]["one"] is not compiled


def test_there_are_few_tenants(cache: TemplateCache) -> None:
    for number in range(3 * MAX_TENANTS):
        with templates_of(str(number)):
            render_template("t", CHAT, {}, {})
        render_template("own", CHAT, {}, {})
    assert len(kept(cache)) == MAX_TENANTS
    assert None in kept(cache)  # it is in use


def test_probes_are_kept_with_their_template(
    cache: TemplateCache, caplog: pytest.LogCaptureFixture
) -> None:
    probe = TemplateProbe("{{ messages[0].content }}", ())
    with caplog.at_level(logging.WARNING, "minfer.templates"):
        with templates_of("a"):
            place_system_messages(SYSTEM, probe)
        size = len(cache._tenants["a"][probe.template])
        assert size > 1
        assert not caplog.records  # a client cannot fill the log
        with templates_of("a"):
            place_system_messages(SYSTEM, probe)
        assert len(cache._tenants["a"][probe.template]) == size
        for _ in range(2):
            place_system_messages(SYSTEM, probe)
    assert len(caplog.records) == 2  # what it does not show, once
