"""The committed table of parameters is that of the types which read them."""

from pathlib import Path

import edgemesh
from edgemesh.api.parameters import FILE, table

PLACE = Path(edgemesh.__file__).parent / "api"


def test_the_committed_table_of_parameters_is_that_of_the_code():
    assert (PLACE / FILE).read_text() == table(), "run: edgemesh api parameters --write edgemesh/api"
