"""Settings of the connector's and the geometry's tests, also when they run by themselves."""

import hypothesis

# No test is about time: a busy machine must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
