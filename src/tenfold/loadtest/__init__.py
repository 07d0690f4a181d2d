"""A load generator for servers that speak OpenAI's HTTP: what `tenfold bench serve` runs.

It knows nothing of Tenfold's own engine, so that every server is measured in the same way:

- ``workload``: what is asked, made up or read from a trace, and when each request is due
- ``sse``, ``client``: one request over HTTP, as a ``Record`` of times and tokens
- ``load``: all requests of a workload, sent when they are due
- ``measures``: from records to latencies, throughput and goodput
- ``report``, ``plot``: the measures as text, as data and as a figure
"""
