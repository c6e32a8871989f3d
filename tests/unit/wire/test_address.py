import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.wire.address import HostAndPort

pytestmark = pytest.mark.unit

hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9.-]{0,30}", fullmatch=True),
)


@given(hosts, st.integers(0, 65535))
def test_an_address_parses_back_from_each_of_its_forms(host, port):
    address = HostAndPort(host, port)
    for text in (address.netloc, address.addr, address.zmq):
        assert HostAndPort.parse(text) == address


def test_brackets_are_written_around_ipv6_only():
    assert HostAndPort("::1", 80).addr == "http://[::1]:80"
    assert HostAndPort("127.0.0.1", 80).addr == "http://127.0.0.1:80"


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "::1:80", "[::1]80", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError):
        HostAndPort.parse(text)


def test_a_host_in_brackets_is_refused():
    with pytest.raises(ValueError, match="bare name or IP literal"):
        HostAndPort("[::1]", 80)
