"""The official openai client against a running `headrace up`.

The Go test TestOpenAIClient in test/e2e starts the servers and runs this; to run it against one that is up already:

    HEADRACE_URL=http://127.0.0.1:8000/v1 python -m pytest test/openai

HEADRACE_WORKERS lists the workers' http://host:port, whose /status tells whether blocks came back. HEADRACE_KEYED_URL
and HEADRACE_KEY are a server that asks for an API key. Tests that need what is not given are skipped, unless CI is set.
"""

import json
import os
import time
import urllib.request

import openai
import pytest


def need(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        if os.environ.get("CI") or os.environ.get("HEADRACE_E2E"):
            pytest.fail(f"{name} is not set")
        pytest.skip(f"{name} is not set")
    return value


@pytest.fixture(scope="session")
def url() -> str:
    return need("HEADRACE_URL")


@pytest.fixture(scope="session")
def client(url):
    # No retries: what a client has to ask for twice is a failure here.
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as c:
        yield c


@pytest.fixture(scope="session")
def model(client) -> str:
    return client.models.list().data[0].id


def worker_status() -> list[dict]:
    out = []
    for worker in need("HEADRACE_WORKERS").split(","):
        with urllib.request.urlopen(f"{worker}/status", timeout=5) as r:
            out.append(json.load(r))
    return out


def eventually(what, limit_s: float = 5.0):
    """Looks until what() is true."""
    deadline = time.monotonic() + limit_s
    while True:
        seen = what()
        if seen is True:
            return
        assert time.monotonic() < deadline, f"not within {limit_s} s: {seen}"
        time.sleep(0.01)


def idle():
    """True when no worker holds a block or a request, else what they say."""
    status = worker_status()
    busy = [
        s
        for s in status
        if s["blocks_free"] != s["blocks_total"] or s["blocks_leased"] or s["blocks_quarantined"] or s["running"] or s["waiting"]
    ]
    return True if not busy else busy
