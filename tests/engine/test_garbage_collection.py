import gc

import pytest

from rolloutdoctor.engine.garbage_collection import RECORDS, rare_collections


@pytest.mark.parametrize(("own", "wanted"), [((700, 10, 10), RECORDS), ((10**6, 2, 2), 10**6), ((0, 10, 10), 0)])
def test_what_a_program_has_set_comes_back(own, wanted):
    usual = gc.get_threshold()
    gc.set_threshold(*own)
    try:
        with rare_collections():
            assert gc.get_threshold() == (wanted, *own[1:])
        assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*usual)
