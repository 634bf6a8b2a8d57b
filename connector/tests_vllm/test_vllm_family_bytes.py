"""Every family's bytes between real NIXL agents, also of families that no CPU engine computes.

The same class runs on the in-memory agent in ``connector/tests``. P's agents make progress by
themselves, as in an engine.
"""

from family_bytes import FamilyBytes

from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Agent


class TestNixlFamilyBytes(FamilyBytes):
    def make_agent(self, name: str) -> Agent:
        return NixlAgent(name, progress_thread=name.startswith("p"))
