"""HybridPD's KV connector: moves the state of hybrid models from prefill to decode engines.

vLLM loads ``hybridpd_connector.connector``. This package imports nothing by itself, so that a
reader of its plain modules needs neither vLLM nor NIXL nor ZeroMQ.
"""

__version__ = "0.1.0"
