import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.wire.ids import Generation, cell_id, cell_of, node_id, parse_cell_id, parse_worker_id, worker_id

pytestmark = pytest.mark.unit

pools = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)
indices = st.integers(0, 99_999)


@given(pools, indices, indices)
def test_ids_parse_back_whatever_hyphens_the_pool_has(pool, cell, worker):
    text = worker_id(cell_id(pool, cell), worker)
    assert parse_worker_id(text) == (pool, cell, worker)
    assert cell_of(text) == cell_id(pool, cell)
    assert parse_cell_id(cell_of(text)) == (pool, cell)


@given(indices, indices)
def test_ids_sort_as_text(a, b):
    assert (a < b) == (node_id(a) < node_id(b))
    assert (a < b) == (cell_id("engine-policy-0", a) < cell_id("engine-policy-0", b))


@pytest.mark.parametrize("text", ["", "engine", "engine-0", "engine-000000", "-00000", "engine-0000x", "engine-٠٠٠٠١"])
def test_what_is_no_cell_id_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not a cell id"):
        parse_cell_id(text)


@pytest.mark.parametrize("text", ["", "engine-00000", "00000-00000", "engine-00000-0"])
def test_what_is_no_worker_id_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not a worker id"):
        parse_worker_id(text)


@pytest.mark.parametrize("index", [-1, 100_000])
def test_an_index_that_does_not_fit_the_width_is_refused(index):
    with pytest.raises(ValueError, match=r"outside 0\.\.99999"):
        node_id(index)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_generations_print_and_parse_back(epoch, n):
    assert Generation.parse(str(Generation(epoch, n))) == Generation(epoch, n)


def test_a_later_epoch_beats_any_counter():
    assert Generation(1, 999) < Generation(2, 1) < Generation(2, 2)
