"""What Prometheus reads."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from support.serving import MODEL, serving

GAUGES = {"blocks", "state_slots", "tail_waste_tokens", "requests_running", "requests_waiting"}
COUNTERS = {
    "allocation_failures",
    "evictions",
    "pages_moved",
    "preemptions",
    "prefix_tokens",
    "requests",
    "tokens",
}
HISTOGRAMS = {"queue_delay_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds", "step_seconds"}


def test_names_and_numbers() -> None:
    with serving() as live:
        for _ in range(3):
            httpx.post(live.url + "/v1/completions", json={"model": MODEL, "prompt": "[[abc]]"})
        httpx.post(live.url + "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2000, "stop": "c"})
        for _ in range(2):
            httpx.post(live.url + "/v1/completions", json={"model": MODEL, "prompt": [65] * 50, "max_tokens": 1})
        response = httpx.get(live.url + "/metrics")
        again = httpx.get(live.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    kinds = {name.removeprefix("tenfold_"): f.type for name, f in families.items() if name.startswith("tenfold_")}
    expected = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
    assert kinds == expected | dict.fromkeys(HISTOGRAMS, "histogram")
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["tenfold_requests_total", "stop"] == 4 and values["tenfold_requests_total", "length"] == 2
    assert values["tenfold_requests_total", "cancelled"] == 0
    assert values["tenfold_tokens_total", "prompt"] == 3 * 8 + 2 + 2 * 50
    assert values["tenfold_tokens_total", "output"] >= 3 * 4 + 3
    prefix = {key[1]: value for key, value in values.items() if key[0] == "tenfold_prefix_tokens_total"}
    assert prefix == {"hit": 48, "cold": 3 * 8 + 2 + 52, "no_checkpoint": 0, "evicted": 0}
    assert {key[1] for key in values if key[0] == "tenfold_evictions_total"} == {"blocks", "checkpoints"}
    assert values["tenfold_blocks", "free"] + values["tenfold_blocks", "cached"] == 4096
    assert {key[1] for key in values if key[0] == "tenfold_blocks"} == {"free", "referenced", "cached"}
    assert {key[1] for key in values if key[0] == "tenfold_state_slots"} == {"free", "taken", "checkpoint"}
    assert {key[1] for key in values if key[0] == "tenfold_allocation_failures_total"} == {"blocks", "slots"}
    assert values["tenfold_time_to_first_token_seconds_count",] == 6
    assert values["tenfold_time_to_first_token_seconds_bucket", "+Inf"] == 6
    assert "process_resident_memory_bytes" in families
    assert "tenfold_tokens_total" in again.text
