"""The software bill of materials: its fields, and that it does not change without a reason."""

import json

import niels_gpt
from scripts import sbom
from scripts.dependencies import closure, own_requirements


def test_the_bill_has_every_run_time_dependency(tmp_path, capsys):
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        assert sbom.main(["--output", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    document = json.loads(paths[0].read_text(encoding="utf-8"))
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.5", 1)
    assert document["serialNumber"].startswith("urn:uuid:")
    assert document["metadata"]["component"]["version"] == niels_gpt.__version__
    components = {component["name"]: component for component in document["components"]}
    needed = closure(own_requirements(extras=()))
    assert {name: one["version"] for name, one in components.items()} == {
        name: found.version for name, found in needed.found.items()
    }
    assert {"torch", "numpy", "markupsafe"} <= components.keys()
    assert "pytest" not in components  # an extra
    for component in components.values():
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}" == component["bom-ref"]
        assert component["licenses"]


def test_the_graph_refers_to_known_components():
    document = sbom.bill({})
    known = {component["bom-ref"] for component in document["components"]}
    root = document["metadata"]["component"]["bom-ref"]
    graph = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    assert graph.keys() == known | {root}
    assert all(set(others) <= known for others in graph.values())
    reached, waiting = set(), [root]
    while waiting:
        reference = waiting.pop()
        if reference not in reached:
            reached.add(reference)
            waiting += graph[reference]
    assert reached == graph.keys()


def test_hashes_are_those_of_the_same_version():
    found = closure(own_requirements(extras=())).found
    version = found["jinja2"].version
    hashes = {("jinja2", version): ["a" * 64, "b" * 64], ("numpy", "0.1"): ["c" * 64]}
    components = {component["name"]: component for component in sbom.bill(hashes)["components"]}
    assert components["jinja2"]["hashes"] == [{"alg": "SHA-256", "content": digest * 64} for digest in "ab"]
    assert "hashes" not in components["numpy"]


def test_a_folder_that_is_missing_is_one_line(tmp_path, capsys):
    assert sbom.main(["--output", str(tmp_path / "absent" / "sbom.json")]) == 1
    err = capsys.readouterr().err
    assert "absent" in err and len(err.splitlines()) == 1
