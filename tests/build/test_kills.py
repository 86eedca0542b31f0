"""Commands that write files are killed, and find no room: a few times here, some hundred by `make test-kills`."""

import os

import pytest

from tests.support.processes import python
from tests.support.scripts import SCRIPTS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the study forks")
def test_what_is_killed_or_finds_no_room_ends_as_if_it_had_not(tmp_path):
    study = SCRIPTS / "studies" / "kills.py"
    python(study, "--only", "join", "--kills", 3, "--full", 1, env=os.environ | {"TMPDIR": str(tmp_path)})
