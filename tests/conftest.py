"""For every layer."""

from hypothesis import HealthCheck, settings

# Time on the wall says nothing about an example: a machine that also runs other things would make them fail by chance.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
