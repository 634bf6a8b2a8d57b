"""What a forked child does with its copy of a transfer agent is nobody else's business."""

import gc
import os

from hybridpd_connector.agent_forks import outlive_forks


class Agent:
    def __init__(self, name, told):
        self.name, self.told = name, told

    def __del__(self):
        os.write(self.told, self.name)


def test_a_child_destroys_no_agent_of_its_parent():
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    agents = [Agent(b"kept", told), Agent(b"other", told)]
    outlive_forks(agents[0])
    child = os.fork()
    if not child:
        agents.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(heard, 100) == b"other"
    agents.clear()
    gc.collect()
    told_here = os.read(heard, 100)
    assert b"kept" in told_here
    assert b"other" in told_here
    os.close(heard)
    os.close(told)
