import re

import pytest

from tests.cli import call
from tests.training import metric_lines

pytestmark = pytest.mark.slow


def test_the_demo_from_end_to_end_and_once_more(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, state in (("demo", "built"), ("demo-2", "cached")):
        assert call("demo", "--steps", 3) == 0
        output = capsys.readouterr().out
        for source in ("wiki", "roam", "primer"):
            assert re.search(rf"^{source} .*embedded \({state}\)", output, re.MULTILINE)
        assert "step 3/3" in output
        for held_out in ("val_wiki", "val_roam", "val_chat"):
            assert re.search(rf"^{held_out} .* 8\.000 *$", output, re.MULTILINE)
        assert "# Notes on " in output
        assert re.search(r"^you> +what is niels\?$", output, re.MULTILINE)
        assert re.search(r"^niels> ", output, re.MULTILINE)
        assert f"niels-gpt chat --run runs/{name}\n" in output
        assert f"niels-gpt batch show --run runs/{name} " in output
        run = tmp_path / "runs" / name
        assert len(metric_lines(run)) == 3
        assert (run / "loss.png").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]  # nothing elsewhere
